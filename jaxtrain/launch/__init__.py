"""How processes are started on machines."""

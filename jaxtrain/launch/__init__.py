"""Starting the processes of a run on machines."""

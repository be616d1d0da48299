"""Tables, drawings and pages that show a plan."""

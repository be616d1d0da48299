"""Reading and writing files safely: whole or not at all, and only inside the folder that is meant."""

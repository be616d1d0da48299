"""Reading the folders of runs, while these run and afterwards."""

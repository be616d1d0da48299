"""What the folders of runs say, while these run and afterwards."""

def explains(e): return True

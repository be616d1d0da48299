"""Parts of jaxtrain that another package brings; pyproject.toml makes them known."""

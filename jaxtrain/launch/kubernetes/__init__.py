"""Jobs in Kubernetes."""

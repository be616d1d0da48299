"""What is done with a trained model: generating text."""

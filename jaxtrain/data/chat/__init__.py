"""Convert conversations to tokens, by chat templates, and to loss masks."""

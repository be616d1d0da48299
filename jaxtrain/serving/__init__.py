"""A training service: an HTTP server that clients of the Tinker API train LoRA adapters on, of one model held once.

`service.py` answers the calls of the API, `http_server.py` carries them, `work_queue.py` runs what needs devices in
order, and `lora_engine.py` computes it. docs/serve-training.md says what a user needs to know.
"""

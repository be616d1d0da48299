"""A tiny published model with a tokenizer of bytes, and a server of it in this process."""

import contextlib
import json
import threading

from jaxtrain.serving.http_server import Server
from jaxtrain.serving.lora_engine import Engine
from jaxtrain.serving.service import Service
from tests.hub import published

NAME, VOCAB, LONGEST = "tiny/llama", 264, 256
END = 257
# One user's message and one assistant's, in the style of ChatML.
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write(folder, vocab=VOCAB, longest=LONGEST):
    """Write the model in Hugging Face's format; its weights follow from their names."""
    case = published.truth("llama")
    old = case["config"]["vocab_size"]
    shapes = {name: [vocab if size == old else size for size in shape] for name, shape in case["tensors"].items()}
    config = case["config"] | {"vocab_size": vocab, "max_position_embeddings": longest, "eos_token_id": END}
    published.write(folder, {"config": config, "tensors": shapes})
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in
                             ("<|endoftext|>", "<|im_end|>", "<|im_start|>")])  # 256, 257, 258
    made.save(f"{folder}/tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE, "model_max_length": LONGEST}))


@contextlib.contextmanager
def served(folder, output, *, keys=None, limits=None, overrides=None, most_bytes=2**20, engine=None, batch_tokens=256):
    """Serve a model's folder on a free port; yield the server."""
    service = Service(engine or Engine.load(folder, overrides, batch_tokens), output, NAME, tokenizer=f"{folder}",
                      limits=limits)
    try:
        with Server(service, keys=keys, most_bytes=most_bytes) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield server
            server.shutdown()
    finally:
        service.close()

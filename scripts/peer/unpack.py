"""Makes a bf16 folder in Hugging Face's layout of a GGUF model: unpack.py SOURCE.gguf TARGET."""

import os
import sys

import torch
import transformers

source, target = sys.argv[1:]
folder, name = os.path.split(source)
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder,
    gguf_file=name,
    dtype=torch.bfloat16,
    quantization_config=transformers.GgufConfig(dequantize=True),
)
model.save_pretrained(target)
transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)

"""Stores a GGUF model's matrices in another type: requantise.py SOURCE TYPE TARGET.

TYPE is one that gguf can write, such as F16 or Q8_0. Vectors and metadata stay as they are.
"""

import sys

import gguf

source, kind_name, target = sys.argv[1:]
kind = gguf.GGMLQuantizationType[kind_name]
reader = gguf.GGUFReader(source)
fields = {field.name: field for field in reader.fields.values()}
architecture = fields.pop(gguf.Keys.General.ARCHITECTURE).contents()
writer = gguf.GGUFWriter(target, architecture)

# The writer makes these itself, and the file's type has changed.
fields.pop(gguf.Keys.General.FILE_TYPE, None)
writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind_name}"])
for field in fields.values():
    if not field.name.startswith("GGUF."):
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)

for tensor in reader.tensors:
    values, stored = tensor.data, tensor.tensor_type
    if len(tensor.shape) > 1:
        values = gguf.quants.quantize(gguf.quants.dequantize(values, stored), kind)
        stored = kind
    writer.add_tensor(tensor.name, values, raw_dtype=stored)

writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

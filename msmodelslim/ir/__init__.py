"""What a quantized thing is: scheme, scale and offset, the module that holds codes. No files, no ranks."""

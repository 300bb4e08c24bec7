"""splitkv inside other libraries: one module each, imported only on request."""

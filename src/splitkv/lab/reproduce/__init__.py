"""`splitkv reproduce`: the tables of the library's sources on this GPU, their claims checked.

works      what is timed, by step: shapes and numbers of splits
backends   who runs it: our kernels, FlashAttention-3
model      the rest of a decode step
run        all of it, taken up again where it was cut short
tables     Markdown from the results
claims     what the sources and we say, checked against the results
"""

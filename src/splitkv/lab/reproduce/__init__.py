"""`splitkv reproduce`: the tables of the library's sources on this GPU, their claims checked.

agenda     what a run does, in which order, and about how long it takes
works      what is timed, by step: shapes and numbers of splits; who runs it: `harness.backends`
model      the rest of a decode step; prefill_step: a prompt through a layer
tracing    which kernels FlashAttention-2 launches for one token
training   loss curves with sinks and without
run        all of it, taken up again where it was cut short
claims     what each source says and what we say, with the table or section of each figure
check      every claim against the results
tables     Markdown from the results; page: all of it as HTML
"""

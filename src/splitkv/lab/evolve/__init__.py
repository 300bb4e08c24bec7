"""`splitkv evolve`: a search for split policies on this GPU.

sandbox    runs a candidate, a Python file, in a process that can do nothing else
candidate  what a candidate is asked and answers, and the plan that follows
workload   the problems that count, and those on which nothing may get slower
timers     who times plans: our kernels, FlashAttention-3, a cost model
evaluate   a candidate's time over the workload, or why it is rejected
grammar    policies as typed expressions, from and to Python
search     islands of policies that mutate and cross over
distil     the simplest rule within a hundredth of the best
guided     candidates proposed by a language model, through OpenEvolve
"""

"""Measure attention on the GPU that is here. Needs the extra `splitkv[lab]`.

harness     what is timed, how, by whom, and where results go: what every room shares
report      tables, pictures and pages from records
bench       decode, whole sequences and models beside other libraries; what is here and is right
tune        many plans of many problems: studies, sweeps, regret, the table of the policy `tuned`
reproduce   the tables of the library's sources, their claims checked
evolve      a search for policies
overview    the results of any command; commands: the command line of all of it
"""

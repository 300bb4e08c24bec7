"""Time many plans of many problems: studies, sweeps, the table of the policy `tuned`, regret."""

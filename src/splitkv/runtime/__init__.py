"""From a call to a running kernel: dispatch, operators, autograd, append, warm-up."""

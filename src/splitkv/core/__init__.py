"""The values: problem, masks, kv, scores, scales, device, errors, plan. No torch, no triton."""

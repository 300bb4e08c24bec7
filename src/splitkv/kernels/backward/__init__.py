"""Gradients of attention, for any NVIDIA GPU: dq, dk, dv, those of sink logits and ALiBi slopes.

Computes, from out, lse and the gradients dout and dlse of both, for each row r and key n,

    total[r] = log(exp(lse[r]) + exp(sink))        p[r, n] = exp(s[r, n] - total[r])
    delta[r] = dout[r] . out[r] - dlse[r] exp(total[r] - lse[r])
    ds[r, n] = p[r, n] (kept[r, n] / (1 - dropout_p) dout[r] . v[n] - delta[r])
    dv[n]    = sum_r p[r, n] kept[r, n] / (1 - dropout_p) dout[r]
    dk[n]    = scale sum_r ds[r, n] s'[r, n] q[r]        dq[r] = scale sum_n ds[r, n] s'[r, n] k[n]
    dsink    = - sum_r exp(sink - total[r]) sum_n p[r, n] kept[r, n] / (1 - dropout_p) dout[r].v[n]
    dslope   = - sum_r sum_n ds[r, n] |pos[r] - n|

where s' = 1 - tanh^2 under a soft cap, else 1. After `backward_rows`, which finds total and delta,
`backward_keys` makes dk and dv, `backward_queries` dq and what dsink and dslope sum over rows. Both
compute p once more, so that every sum is made by one program in one order: no atomics, the same
bits every time.

With sink tokens the first keys are seen by far more rows than a window of keys is: their tiles come
before all others. Where a program would be the last to end for all that, and where there are fewer
tiles of keys than fill the GPU, the rows that see a tile are split among programs, whose sums
`backward_finish` adds up: see row_splits.py. It adds up what rows leave of dsink, too.

To be read in this order: rows.py, keys.py, queries.py, finish.py; what is launched, launcher.py.

Shapes      as in `prefill`; rows of statistics: see Stats
Grid        backward_rows, backward_queries  row tiles x lanes, as in `prefill`
            backward_keys                    row splits x KV heads x sequences x tiles that come
                                             first, then tiles of keys x lanes, the first and so
                                             heaviest first; the heads of a group are more rows
Traffic     reads q, k, v, out, dout, writes dq, dk, dv; 8 bytes of statistics a row, 12 with sink
            logits; flops 7 products of 2 * pairs * head_dim where the forward has 2
Numerics    scores, p, ds and sums in fp32; p and ds are rounded to the type of q before a product;
            where that is fp32, sums over tiles are compensated: thousands of them may follow
Limits      those of `prefill`
"""

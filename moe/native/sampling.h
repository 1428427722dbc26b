// Tokens of whole batches, to the bits of the sampler's slow reference.
#pragma once

#include <cstdint>

namespace interlace {

// For each row of logits [num_rows, size] its token and the values of two float32 log-probabilities,
// under the model and at the row's temperature (0: the most likely token, at temperature 1), as
// `out` [num_rows, 3]. The token is -1 where rounding could make a difference to any of the three:
// then the reference has to be asked. `noise` [num_rows, 3]: seed, trajectory and position.
// `weights` are `size` doubles to work in.
void draw(double *out, const float *logits, const double *temperature, const uint64_t *noise,
          int64_t num_rows, int64_t size, double *weights);

}  // namespace interlace

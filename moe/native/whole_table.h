// All kernels, for whoever computes all of them with the vectors and tiles included before.

#include "packed.h"
#include "sums.h"
//
#include "product.h"
//
#include "attention.h"
#include "rows.h"

template <class T>
constexpr KernelsOf<T> OF = {
    pack<T>, multiply<T>, experts<T>, norm<T>, choose<T>, mix<T>, turn_heads<T>, attend<T>,
};

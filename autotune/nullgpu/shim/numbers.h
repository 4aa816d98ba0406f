// Arithmetic on NCCL's data types, for the small tensors whose values ranks exchange.
#pragma once
#include <vector>

#include "common.h"

namespace nullgpu {

// ncclDataType_t
enum Type : int { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, TYPES };
// ncclRedOp_t; from CUSTOM on, numbers that ncclRedOpCreatePreMulSum gave out.
enum Operation : int { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, CUSTOM };

bool is_type(int type);
size_t size_of(int type);  // bytes of one number

// Writes to `to` the reduction of `count` numbers of each source. `scale` multiplies each number before a sum; 1 if none.
// Sums are made in double precision, or exactly for integers, and rounded once.
void reduce(void *to, const std::vector<const void *> &sources, size_t count, int type, int operation, double scale);

double number_at(const void *at, int type);

}  // namespace nullgpu

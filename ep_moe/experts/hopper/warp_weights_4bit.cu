// Part of fused_4bit.cu and gemm_skinny_4bit.cu: weights of 4 bits that a warp loads from global memory into the registers
// that the tensor cores read (mma). Given: what numbers_4bit.cu wants, and the name of the activation, if there is one.
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int PACKED = 64;                   // bytes of a row of weights in a block
constexpr int SHARE = GROUP == 128 ? 2 : 1;  // blocks with one word of scales

#include "activation.cu"
#include "numbers_4bit.cu"

__device__ __forceinline__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// A block of a warp's weights, as a thread has them: 16 bytes and the scales of two rows.
struct Block {
  uint4 codes[2];
  u32 scales[2][WORDS];

  // 32 columns of a row
  __device__ __forceinline__ u32 word(int i, int g) const {
    return g == 0 ? codes[i].x : g == 1 ? codes[i].y : g == 2 ? codes[i].z : codes[i].w;
  }
};

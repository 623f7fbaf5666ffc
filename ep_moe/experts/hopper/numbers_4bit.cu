// Part of the CUDA kernels with weights of 4 bits: codes as numbers of bf16, or of E4M3 with FP8. Given besides: INT4 (else
// E2M1), GROUP columns of a scale, WORDS of scales in a block of 128 columns of a row.

[[maybe_unused]] constexpr int EXPONENTS = 20;  // of a group below its row's largest

#if FP8
// Registers of weights for 32 columns of a row: two times four numbers.
constexpr int NUMBERS = 2;

__device__ __forceinline__ u32 four_of(u32 low, u32 high, u32 which) {
  u32 found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(which));
  return found;
}

#if INT4
// Eight codes of a word: 0 to 7, or -8 to -1 where the sign says so.
__device__ __forceinline__ void numbers(u32 q, u32 (&to)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 which = (q & 0x77777777u) >> 16 * i;
    const u32 above = four_of(0x44403800u, 0x4E4C4A48u, which), below = four_of(0xCACCCED0u, 0xB8C0C4C8u, which);
    const u32 negative = four_of(q << 4 * i, 0, 0xBA98);  // all bits of a byte as its highest
    to[i] = (above & ~negative) | (below & negative);
  }
}
#else
// E4M3 of 0, .5, 1, 1.5, 2, 3, 4, 6 times 2 ** (6 - i), to the nearest, for each i below EXPONENTS; zeros for the last.
__device__ const u64 NUMBERS_OF[EXPONENTS] = {
// NUMBERS_OF
};

// Where a program keeps them. threads: all of it
__device__ __forceinline__ void keep_numbers(u32 table) {
  if (threadIdx.x < EXPONENTS)
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(table + threadIdx.x * 8), "l"(NUMBERS_OF[threadIdx.x]) : "memory");
}

// Eight codes of a word. largest: exponent of the row; words: of the row's scales; g: the group
__device__ __forceinline__ void numbers(u32 q, u32 table, int largest, const u32 (&words)[WORDS], int g, u32 (&to)[2]) {
  const u32 below = min((u32)largest - (words[0] >> 8 * g & 0xFF), (u32)EXPONENTS - 1);  // a larger one: of zeros
  u32 low, high;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(table + below * 8));
  const u32 which = q & 0x77777777u;
  to[0] = four_of(low, high, which) | (q & 0x80808080u);
  to[1] = four_of(low, high, which >> 16) | (q << 4 & 0x80808080u);
}

// The exponent of a row's largest group, by its scale.
__device__ __forceinline__ int largest_of(float row_scale) { return (__float_as_int(row_scale) >> 23) + 6; }
#endif
#else
constexpr int NUMBERS = 4;

__device__ __forceinline__ u32 times(u32 two, u32 factors) {
  u32 found;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(two), "r"(factors));
  return found;
}

#if INT4
// Eight codes of a word by their scale, as four times two numbers of bf16 in units of 2**-32, rounded once. words: of the
// row's scales; g: the 32 columns in the block. The first two are of one step along K, the others of the next.
__device__ __forceinline__ void numbers(u32 q, const u32 (&words)[WORDS], int g, int block, u32 (&to)[4]) {
  const int odd = GROUP == 32 ? g % 2 : block % 2;
  const u32 scale = __byte_perm(words[GROUP == 32 ? g / 2 : 0], 0, odd ? 0x3232 : 0x1010);
  const u32 factor = times(scale, 0x72007200u), eight = times(scale, 0xB100B100u);  // 2**101, -8 * 2**-32: exact
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 raised = (q >> 4 * i) & 0x000F000Fu;  // (code + 8) * 2**-133
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to[i]) : "r"(raised), "r"(factor), "r"(eight));
  }
}
#else
// Scales of E2M1 of a word's two steps, times 2**94, each as two equal numbers of bf16.
__device__ __forceinline__ void factors_of(const u32 (&words)[WORDS], int g, u32 (&to)[2]) {
#if GROUP == 32
  to[0] = to[1] = __byte_perm(words[0], 0, 0x4040 | 0x101 * g) * 0x80u + 0x2F002F00u;  // (a byte + 94) << 7, twice
#else
  u32 halves;  // of float16, which holds E4M3
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)(words[g / 2] >> 16 * (g % 2))));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)(halves >> 16 * i)));
    const u32 bits = __float_as_uint(wide * 1.9807040628566084e28f);
    to[i] = __byte_perm(bits, bits, 0x3232);
  }
#endif
}

// The same of E2M1, exactly.
__device__ __forceinline__ void numbers(u32 q, const u32 (&words)[WORDS], int g, int, u32 (&to)[4]) {
  u32 factors[2];
  factors_of(words, g, factors);
  // 2**-126 times the number
  to[0] = q & 0x81C081C0u;
  to[1] = (q << 3) & 0x81C081C0u;
  to[2] = (q << 6) & 0x81C081C0u;
  to[3] = ((q << 1) & 0x80008000u) | ((q >> 3) & 0x01800180u) | ((q >> 7) & 0x00400040u);
#pragma unroll
  for (int i = 0; i < 4; i++) to[i] = times(to[i], factors[i / 2]);
}
#endif
#endif

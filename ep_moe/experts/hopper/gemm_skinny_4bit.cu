// The products of the fewest routes of gemm_skinny_4bit.py: out[p] = act(w[e] @ x[p]) for each row p of expert e, with
// weights of 4 bits as weights/layouts/hopper_4bit.py has them.
//
// A warp multiplies 16 rows of weights, which it loads from global memory into the registers that the tensor cores read
// (mma), with eight rows of x, which a program copies to shared memory, CHUNK blocks of 128 columns at a time and one
// chunk ahead. SPLIT warps share the blocks of the same 16 rows of weights.
// Rows are of E4M3 with a scale each, and so become the weights.
// Given, besides what warp_weights_4bit.cu wants, which is with FP8: WARPS of a program, SPLIT, AHEAD blocks whose weights
// a warp has under way, PROGRAMS of a multiprocessor, GATED and BIASED.
#include "warp_weights_4bit.cu"

constexpr int THREADS = 32 * WARPS, TILES = WARPS / SPLIT, COLUMNS = TILES * (GATED ? 8 : 16);
constexpr int CHUNK = AHEAD * SPLIT, LINE = CHUNK * 128 + 16;  // blocks; bytes from a row to the next
constexpr int ROWS = 8;                                        // of a tile, which tensor cores multiply at once

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

// What a thread's two rows of weights become numbers by. g: the 32 columns in the block
struct Weights {
  u32 table;
  int largest[2];

  __device__ __forceinline__ void of(const Block& own, int i, int g, u32 (&to)[NUMBERS]) const {
#if INT4
    numbers(own.word(i, g), to);
#else
    numbers(own.word(i, g), table, largest[i], own.scales[i], g, to);
#endif
  }
};

// Adds a block's products. rows: where the lane's line of eight rows is, in the block's first columns; block: along K
__device__ __forceinline__ void add_block(float (&sum)[4], const Block& own, const Weights& weights, u32 rows,
                                          int block) {
#if INT4
  float part[4];
#endif
  u32 x[4];  // of 64 bytes of a row
#pragma unroll
  for (int g = 0; g < 4; g++) {
    u32 a[2][NUMBERS];
    weights.of(own, 0, g, a[0]);
    weights.of(own, 1, g, a[1]);
    if (g % 2 == 0)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(rows + g * 32));
#if INT4
    if (GROUP == 32 || g == 0) part[0] = part[1] = part[2] = part[3] = 0.0f;
    float(&into)[4] = part;
#else
    float(&into)[4] = sum;
#endif
    multiply(into, a[0][0], a[1][0], a[0][1], a[1][1], x[g % 2 * 2], x[g % 2 * 2 + 1]);
#if INT4
    if (GROUP == 32 || g == 3) {
      const int half = GROUP == 32 ? g % 2 : block % 2;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 word = own.scales[i / 2][GROUP == 32 ? g / 2 : 0];
        sum[i] += part[i] * __uint_as_float(half ? word & 0xFFFF0000u : word << 16);
      }
    }
#endif
  }
}

// x: `depth` columns of E4M3, x_scale of each row; ids: of `id_bytes` each, and routing weights or none, of `pairs` routes;
// codes and scales: `rows` of an expert, in `blocks`; row_scale, of E2M1, and bias: of its rows; out: bf16, `width` columns;
// every: routes of a row of x, or 1
extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    gemm_skinny_4bit(const char* x, const float* x_scale, const char* ids, int id_bytes, const float* routing,
                     const char* codes, const u32* scales, const float* row_scale, const unsigned short* bias,
                     unsigned short* out, int base, int pairs, int experts, int depth, int rows, int width, int blocks,
                     int every, float alpha, float limit) {
  extern __shared__ __align__(128) char memory[];
  int(&from)[ROWS] = *(int(*)[ROWS])memory;  // row of x, and of out
  int(&to)[ROWS] = *(int(*)[ROWS])(memory + 4 * ROWS);
  char* const room = memory + 8 * ROWS + 8 * EXPONENTS;
#if !INT4
  keep_numbers(shared(memory + 8 * ROWS));
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4;
  const int tile = warp % TILES, piece = warp / TILES;
  const int columns = (width + COLUMNS - 1) / COLUMNS;
  const int asked = blockIdx.x / columns, column = blockIdx.x % columns * COLUMNS;
  int own = -1;
  if (lane < pairs && !(routing && __ldg(routing + lane) == 0.0f)) {
    own = __ldg((const int*)(ids + lane * id_bytes)) - base;
    if (own < 0 || own >= experts) own = -1;
  }
  // for each route, of which an expert's first one counts, or for each expert
  const int expert = pairs <= experts ? __shfl_sync(~0u, own, asked) : asked;
  const u32 mine = __ballot_sync(~0u, own == expert);
  if (expert < 0 || mine == 0 || (pairs <= experts && __ffs(mine) - 1 != asked)) return;
  const int first = column + tile * (GATED ? 8 : 16) + line, apart = GATED ? width : 8;
  const bool busy = column + tile * (GATED ? 8 : 16) < width;  // width: a multiple of 64
  const int scale_blocks = (blocks + SHARE - 1) / SHARE;
  const char* const own_codes = codes + ((u64)expert * blocks * rows + first) * PACKED + lane % 4 * 16;
  const u32* const own_scales = scales + (u64)expert * scale_blocks * WORDS * rows + first;
  auto load = [&](Block& to, int block) {
    if (!busy || block >= blocks) return;
    const char* const at = own_codes + (u32)(block * rows * PACKED);
    const u32* const scale_at = own_scales + (u32)(block / SHARE * WORDS * rows);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to.codes[i].x), "=r"(to.codes[i].y), "=r"(to.codes[i].z), "=r"(to.codes[i].w)
                   : "l"(at + (i ? apart * PACKED : 0)));
#pragma unroll
      for (int word = 0; word < WORDS; word++)
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(to.scales[i][word]) : "l"(scale_at + word * rows + (i ? apart : 0)));
    }
  };
  float scaled[2] = {1.0f, 1.0f};
  Weights weights{shared(memory + 8 * ROWS)};
#if !INT4
  if (busy)
    for (int i = 0; i < 2; i++) {
      scaled[i] = __ldg(row_scale + expert * rows + first + i * apart);
      weights.largest[i] = largest_of(scaled[i]);
    }
#endif
  const int chunks = (blocks + CHUNK - 1) / CHUNK;
#pragma unroll 1
  for (int begin = 0; begin < __popc(mine); begin += ROWS) {
    Block coming[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) load(coming[j], piece + SPLIT * j);
    __syncthreads();  // all have done with the rows before
    if (threadIdx.x < 32) {
      const int at = __popc(mine & ((1u << lane) - 1)) - begin;
      if (lane < ROWS) from[lane] = to[lane] = -1;
      __syncwarp();
      if ((mine >> lane & 1) && at >= 0 && at < ROWS) from[at] = lane / every, to[at] = lane;
    }
    __syncthreads();
    auto stage = [&](int chunk) {
      constexpr int PARTS = CHUNK * 8;  // of 16 bytes
      const u32 at = shared(room) + chunk % 2 * (ROWS * LINE);
#pragma unroll 2
      for (int i = threadIdx.x; i < ROWS * PARTS; i += THREADS) {
        const int row = i / PARTS, part = i % PARTS, byte = (chunk * PARTS + part) * 16;
        const bool there = from[row] >= 0 && byte < depth;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + row * LINE + part * 16),
                     "l"(x + (there ? (u64)from[row] * depth + byte : 0)), "r"(there ? 16 : 0)
                     : "memory");
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
    stage(0);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncthreads();
      if (chunk + 1 < chunks) stage(chunk + 1);
      const u32 at = shared(room) + chunk % 2 * (ROWS * LINE) + lane % 8 * LINE + lane / 8 * 16;
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        const int block = chunk * CHUNK + piece + SPLIT * j;
        if (!busy || block >= blocks) break;
        const Block own = coming[j];
        load(coming[j], block + CHUNK);
        add_block(sum, own, weights, at + (piece + SPLIT * j) * 128, block);
      }
    }
    if constexpr (SPLIT > 1) {
      __syncthreads();
      float* const others = (float*)room + tile * 4 * 32 + lane;
      if (piece > 0)
        for (int i = 0; i < 4; i++) others[((piece - 1) * TILES * 4 + i) * 32] = sum[i];
      __syncthreads();
      if (piece == 0)
        for (int other = 1; other < SPLIT; other++)
          for (int i = 0; i < 4; i++) sum[i] += others[((other - 1) * TILES * 4 + i) * 32];
    }
    if (piece == 0 && busy) {
      float added[2] = {0.0f, 0.0f};
      if (BIASED)
        for (int i = 0; i < 2; i++)
          added[i] = __uint_as_float((u32)__ldg(bias + expert * rows + first + i * apart) << 16);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int at = lane % 4 * 2 + odd, row = to[at];
        if (row < 0) continue;
        const float by = __ldg(x_scale + from[at]);
        const float one = sum[odd] * (by * scaled[0]) + added[0], other = sum[2 + odd] * (by * scaled[1]) + added[1];
#pragma unroll
        for (int i = 0; i < (GATED ? 1 : 2); i++) {
          const float value = GATED ? activate(one, other, alpha, limit) : activate(i ? other : one, 0.0f, alpha, limit);
          unsigned short bits;
          asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
          out[(u64)row * width + first + 8 * i] = bits;
        }
      }
    }
  }
}

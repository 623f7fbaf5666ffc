// The grouped products of gemm_grouped.py: out[r] = act(a[r] @ b[e].T) for each row r of expert e; with TURNED
// out[r] = a[r] @ b[e]; with OVER_ROWS out[e] = the sum over its rows r of a[r].T @ b[r], where b is called weights here.
// With GATHER (not OVER_ROWS) a[source[r]] is read for row r; with AWAY row r is written to addresses[r] instead. With
// BLOCKS each 128 numbers along K of a row, and each 128 x 128 of weights, have a scale (E4M3, as they lie). With
// ACCUMULATE (OVER_ROWS) results are added to out.
//
// One thread copies operands into a ring of stages (TMA), all of its group rows that are gathered; two groups of four
// warps multiply 128 rows of weights each, of the tile's 256, with the tile's rows (wgmma) and write what comes out,
// turned, through shared memory. With PINGPONG each group has tiles of its own, of 128 rows of weights: the groups take
// turns, and while one multiplies the other writes.
// With FOUR_BITS weights are of 4 bits (gemm_grouped_4bit.cu), and sums of them in bf16 in units of a_factor.
// Given: IN_BYTES and OUT_BYTES of a number, MOST rows of a tile, of which there are a multiple of ROUND, PROGRAMS of a
// multiprocessor, GATED, SCALED_ROWS, CHANNELS, BLOCKS, BIASED, TURNED, OVER_ROWS, GATHER, AWAY, ACCUMULATE, PINGPONG,
// FACTOR (sums of bf16 are multiplied by a_factor), and the name of the activation, if there is one.
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map {  // the driver's
  char bytes[128];
};

constexpr int LINE = 128;                  // bytes along K of a stage
constexpr int GROUPS = 2;
constexpr int SHARING = PINGPONG ? 1 : GROUPS;           // groups of a tile
constexpr int WEIGHTS = 128 * SHARING;                   // rows of weights in a tile
constexpr int STEP = 16;                   // of a tile's width
constexpr int WIDE = 64;                   // rows of a copy, while there are as many: each takes some 60 cycles to start
constexpr int COLUMNS = GATED ? 64 : 128;  // of a group's results
constexpr int UNIT = OUT_BYTES == 1 ? 16 : 8;            // columns that a warp's eight rows of threads have
constexpr int PIECES = GATED && OUT_BYTES == 1 ? SHARING : 1;  // copies of a stage's weights
// Results on their way out, in boxes of 16 rows (8 of float32) and up to 128 bytes; a group has two chunks of them, in
// turns.
constexpr int ACROSS = COLUMNS * OUT_BYTES < 128 ? COLUMNS * OUT_BYTES : 128;
constexpr int BOXES = COLUMNS * OUT_BYTES / ACROSS;
constexpr int BOX_ROWS = OUT_BYTES == 4 ? 8 : STEP;
constexpr int BOX = BOX_ROWS * ACROSS;
// Operands whose lines go along K have 32 bytes from one instruction to the next; those whose lines go across K, 64
// numbers each, have 16 lines, and 64 lines from one 64 numbers to the next. In 16 bytes:
constexpr int ALONG = 2, ACROSS_K = 16 * LINE / 16;
[[maybe_unused]] constexpr int WEIGHT_STEP = TURNED || OVER_ROWS ? ACROSS_K : ALONG, ROW_STEP = OVER_ROWS ? ACROSS_K : ALONG;
constexpr int DEEP = 64;  // lines across K of a stage
constexpr int COPIERS = GATHER || BLOCKS ? 128 : 1;  // threads that fill a stage
// Of a thread that copies and of one that multiplies: 168 of each thread are all there are, 80 of two programs.
constexpr int FEWER_REGISTERS = PROGRAMS == 1 ? (GATHER ? 56 : 40) : (GATHER ? 48 : 32);
constexpr int MORE_REGISTERS = PROGRAMS == 1 ? (GATHER ? 224 : 232) : (GATHER ? 96 : 104);
constexpr int CHUNK = 4096;
constexpr int CHUNK_ROWS = CHUNK / (COLUMNS * OUT_BYTES);
static_assert(!ACCUMULATE || (OVER_ROWS && OUT_BYTES > 1), "only gradients of weights are accumulated");
static_assert(!PINGPONG || (!BLOCKS && !FOUR_BITS), "their groups share tiles");
static_assert(OUT_BYTES != 4 || OVER_ROWS, "only gradients of weights are float32");

#include "gemm_grouped_tiles.cu"
#include "gemm_grouped_multiply.cu"
#include "gemm_grouped_store.cu"
#include "gemm_grouped_copy.cu"
#if FOUR_BITS
#include "gemm_grouped_4bit.cu"
#endif

// wide, step: a, in boxes of so many rows. ends: of each expert's rows. n: columns of out. units: of an expert's weights,
// as their map counts them. most: rows of a tile.
// OVER_ROWS: weights: b, wide: a, in boxes of 64 numbers and DEEP rows; units: columns of a.
// With FACTOR sums are multiplied by a_factor.
// Of operands in E4M3: sums are multiplied by a_factor, a_scale and b_scale of the expert, results divided by out_scale.
// With SCALED_ROWS a_scale is of each row; with CHANNELS b_scale is of each row of weights; with BLOCKS a_scale is of
// each row of a and block along K, by the strides a_step and b_step, and b_scale [experts, weights / 128, k_blocks].
// bias, with BIASED: of each row of weights, added to the scaled sums.
// With FOUR_BITS: codes and code_scales instead of weights; k_blocks: boxes of 128 bytes.
// With GATHER: gathered: a; source: the row of it for each row of out; row_bytes: of a. With AWAY: addresses: of rows.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), PROGRAMS)
    gemm_grouped(const __grid_constant__ Map weights, const __grid_constant__ Map wide, const __grid_constant__ Map step,
                char* out, const int* ends, const float* a_scale, const float* b_scale, const float* out_scale,
                const unsigned short* bias, float a_factor, int a_step, int b_step, int experts, int all_rows, int n, int units, int k_blocks, int most, int stages, float alpha, float limit,
                const char* gathered, const int* source, int row_bytes, const u64* addresses, const char* codes,
                const char* code_scales) {
  extern __shared__ __align__(1024) char memory[];
#if FOUR_BITS
  const int stage_bytes = STAGE_BOXES * most * LINE + WEIGHTS * (PACKED + 4 * WORDS);
#else
  const int stage_bytes = (WEIGHTS + most) * LINE;
#endif
  const int columns = (n + COLUMNS * SHARING - 1) / (COLUMNS * SHARING);
  char* chunks = memory + stages * stage_bytes;
  u64* bars = (u64*)(chunks + GROUPS * 2 * CHUNK);
  float* scales = (float*)(bars + 2 * stages);
#if FOUR_BITS && FP8 && !INT4
  const u32 table = shared(scales);
  keep_numbers(table);
  int* first = (int*)(scales + 2 * EXPONENTS);
#else
  int* first = (int*)(scales + (BLOCKS ? stages * MOST : 0));
#endif
  int* limits = first + experts + 1;
  Ring ring{shared(memory), shared(bars), shared(bars + stages), stages, stage_bytes, 0, 0};
  if (threadIdx.x < 32) prepare(ends, first, limits, experts, all_rows, columns, ring, most, units);
  __syncthreads();
  Walk tiles{first, limits, experts, columns, most, (int)blockIdx.x, 0};
  tiles.across = units;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // one number for a warp, as the compiler sees then
  if (group == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEWER_REGISTERS));
#if FOUR_BITS
    if (threadIdx.x < 128 * GROUPS + COPIERS)
      copy_packed(wide, step, ring, tiles, most, k_blocks, n, Gathered(gathered, source, row_bytes), codes, code_scales);
#else
    if (threadIdx.x < 128 * GROUPS + COPIERS)
      copy(weights, wide, step, ring, tiles, units, k_blocks, Gathered(gathered, source, row_bytes), a_scale, a_step,
           b_step, shared(scales));
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE_REGISTERS));
    Out to{out, shared(chunks) + group * 2 * CHUNK, n, group, alpha, limit, 0, a_scale, b_scale, bias, addresses};
    for (int turn = 0; tiles.next(); turn++) {
      if (OVER_ROWS) k_blocks = tiles.deep();
      if (PINGPONG && turn % GROUPS != group) {
        ring.skip(k_blocks);
        continue;
      }
      if (PINGPONG && turn > 0) wait_for_turn(group);
      float scale = a_factor, factor = 1.0f;
      if (a_scale && !SCALED_ROWS && !BLOCKS) scale *= a_scale[tiles.expert * a_step];
      if (BIASED) to.bias = bias + tiles.expert * (GATED ? 2 * n : n);
      if (CHANNELS)
        to.channel_scale = b_scale + tiles.expert * b_step;
      else if (b_scale && !BLOCKS)
        scale *= b_scale[tiles.expert * b_step];
      if (out_scale) factor = 1.0f / out_scale[tiles.expert];
      float sum[2][MOST / 2];
#if BLOCKS
      const Blocks blocks(b_scale, tiles, group, n, k_blocks);
#define WIDTH(I) \
  case I: \
    multiply_blocks<I * STEP>(sum, ring, group, k_blocks, shared(scales), blocks); \
    break;
#elif FOUR_BITS
      RowExponents exponents;
#if FP8 && !INT4
      Channels own;
      own.load(to, tiles, 1.0f);
      exponents.load(table, own);
#endif
#if FP8 && INT4
#define MULTIPLY multiply_scaled
#else
#define MULTIPLY multiply_packed
#endif
#define WIDTH(I) \
  case I: \
    MULTIPLY<(I) * STEP>(sum, ring, most, group, k_blocks, exponents); \
    break;
#else
#define WIDTH(I) \
  case I: \
    multiply<I * STEP>(sum, ring, group, k_blocks, OVER_ROWS ? tiles.rows - (k_blocks - 1) * DEEP : DEEP, tiles.more()); \
    break;
#endif
      switch (tiles.width / STEP) {
#if OVER_ROWS
        WIDTH(4) WIDTH(8) WIDTH(12)
#elif BLOCKS
        WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4) WIDTH(5) WIDTH(6)
#elif FOUR_BITS
        WIDTH(ROUND / STEP)
#if MOST / ROUND > 1
        WIDTH(2 * ROUND / STEP)
#endif
#if MOST / ROUND > 2
        WIDTH(3 * ROUND / STEP)
#endif
#else
        WIDTH(1) WIDTH(2) WIDTH(3) WIDTH(4) WIDTH(5) WIDTH(6) WIDTH(7) WIDTH(8) WIDTH(9) WIDTH(10) WIDTH(11) WIDTH(12)
#endif
      }
      store(sum, tiles, to, scale, factor);
    }
  }
}

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

__device__ __forceinline__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          barrier),
      "r"(phase)
      : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Of an operand whose lines of 128 bytes are swizzled, 1024 bytes from eight of them to the next; across K, DEEP lines
// from 64 numbers to the next 64.
__device__ __forceinline__ u64 operand(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | ((u64)(DEEP * LINE >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

template <int N>
struct Multiply;  // 64 rows of weights with N rows, 32 bytes along K; more: to the sums, which it begins otherwise
// Multiply<STEP> to Multiply<MOST>

// Walks over the tiles of a program: of each expert, column by column, all its rows.
struct Walk {
  const int* first;  // tile of each expert, and how many there are
  const int* ends;
  int experts, columns, most, tile, expert;
  int row, count, width, column;  // of the tile: first row, rows, rows in steps
  int across;                     // OVER_ROWS: columns of a, which are rows of out
  int start, rows;                // of the expert

  __device__ __forceinline__ bool more() const { return tile < first[experts]; }

  // A group's first column of out.
  __device__ __forceinline__ int first_column(int group) const { return (column * SHARING + group % SHARING) * COLUMNS; }

  // Blocks of an expert's rows: one, of zeros, where it has none.
  __device__ __forceinline__ int deep() const { return max(1, (rows + DEEP - 1) / DEEP); }

  __device__ __forceinline__ bool next() {
    if (!more()) return false;
    while (tile >= first[expert + 1]) expert++;
    start = expert ? ends[expert - 1] : 0, rows = ends[expert] - start;
    if (OVER_ROWS) {
      const int cuts = (across + most - 1) / most, own = tile - first[expert];
      column = own / cuts;
      row = own % cuts * most;
      count = width = min(most, across - row);
      tile += gridDim.x;
      return true;
    }
    const int cuts = (rows + most - 1) / most;
    width = ((rows + cuts - 1) / cuts + ROUND - 1) / ROUND * ROUND;
    const int own = tile - first[expert];
    column = own / cuts;
    row = start + own % cuts * width;
    count = min(width, start + rows - row);
    tile += gridDim.x;
    return true;
  }
};

#include "activation.cu"

__device__ __forceinline__ u32 two_bf16(float a, float b) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}

__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return (u32)low | (u32)high << 16;
}

// Four (two) matrices of 8 x 8 pairs of bytes, turned, each row where one of the lanes says.
__device__ __forceinline__ void store_turned(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_turned(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

// Where 16 bytes of a row of a box are, so that eight rows' are in different banks.
__device__ __forceinline__ u32 place(int row, int part) {
  return row * ACROSS + (ACROSS == 128 ? part ^ (row & 7) : part ^ (row >> 1 & 3)) * 16;
}

struct Ring {
  u32 memory, full, free;
  int stages, stage_bytes, stage;
  u32 phase;

  __device__ __forceinline__ u32 at() const { return memory + stage * stage_bytes; }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int blocks) {
    phase ^= (stage + blocks) / stages & 1, stage = (stage + blocks) % stages;
  }
};

struct Out {
  char* memory;
  u32 chunks;  // of my group
  int n, group;
  float alpha, limit;
  int turn;
  const float* row_scale;
  const float* channel_scale;  // of the expert
  const unsigned short* bias;  // bf16, of the expert
  const u64* addresses;        // of all rows
};

// Scales of a tile's rows: a lane has those of row `lane`, `lane` + 32 and so on, and shows them to its warp.
struct RowScales {
  static constexpr int HELD = (MOST + 31) / 32;
  float own[SCALED_ROWS ? HELD : 1];

  __device__ __forceinline__ void load(const float* scale, const Walk& tiles) {
#pragma unroll
    for (int i = 0; i < HELD; i++) own[i] = __ldg(scale + tiles.row + min(32 * i + (int)threadIdx.x % 32, tiles.count - 1));
  }
  __device__ __forceinline__ float at(int j, int odd) const {  // of row 8 * j + 2 * (lane % 4) + odd
    return __shfl_sync(~0u, own[j / 4], j % 4 * 8 + threadIdx.x % 4 * 2 + odd);
  }
};

// Scales and biases of rows of weights, of which a lane has sums of four: 64 rows of its group's 128, 8 of its warp's 16.
// Columns past the last are not written, and take its numbers.
struct Channels {
  float own[CHANNELS ? 2 : 1][CHANNELS ? 2 : 1], added[BIASED ? 2 : 1][BIASED ? 2 : 1];

  __device__ __forceinline__ void load(const Out& to, const Walk& tiles, float scale) {
    static_assert(!(CHANNELS || BIASED) || OUT_BYTES == 2, "weights lie otherwise for results in E4M3");
    const int warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int inside = GATED ? 32 * m + 8 * warp + line : 64 * m + 16 * warp + 8 * i + line;
        const int column = min(tiles.first_column(to.group) + inside, to.n - 1) + (GATED && i ? to.n : 0);
        if (CHANNELS) own[CHANNELS ? m : 0][CHANNELS ? i : 0] = scale * __ldg(to.channel_scale + column);
        if (BIASED) added[BIASED ? m : 0][BIASED ? i : 0] = __uint_as_float((u32)__ldg(to.bias + column) << 16);
      }
  }
  __device__ __forceinline__ float of(float sum, float one, int m, int i) const {
    const float scaled = CHANNELS ? sum * one * own[CHANNELS ? m : 0][CHANNELS ? i : 0] : sum * one;
    return BIASED ? scaled + added[BIASED ? m : 0][BIASED ? i : 0] : scaled;
  }
};

// The lines of a stage behind an expert's last row are the next one's, or nothing: zeros in both operands, in the 16 lines
// of the last instruction.
__device__ __forceinline__ void clear_tail(u32 stage, int group, int boxes, int tail, int lines) {
  const int me = threadIdx.x % 128, own = group % SHARING;
  for (int i = me; i < lines * 8; i += 128) {
    const u32 at = stage + (tail + i / 8) * LINE + i % 8 * 16;
    for (int box = own; box < boxes; box += SHARING)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + (WEIGHTS / 64 + box) * DEEP * LINE), "r"(0) : "memory");
    for (int box = 2 * own; box < 2 * own + 2; box++)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + box * DEEP * LINE), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, %1;" ::"r"(PINGPONG ? group + 1 : GROUPS + 1), "n"(128 * SHARING) : "memory");
}

// Scales of a stage's block: of the rows in shared memory, of the weights for the rows that a group has.
struct Blocks {
  const float* weights;  // of the group's weights, from the first block along K on
  int up;                // from there to the scale of a gate's `up`
  float own[GATED ? 2 : 1], coming[GATED ? 2 : 1];

  __device__ __forceinline__ Blocks(const float* scales, const Walk& tiles, int group, int n, int k_blocks) {
    const int line = tiles.first_column(group) / 128, lines = (GATED ? 2 * n : n) / 128;
    weights = scales + ((u64)tiles.expert * lines + min(line, n / 128 - 1)) * k_blocks, up = n / 128 * k_blocks;
    load(0);
  }
  __device__ __forceinline__ void load(int k) {  // for the next `turn`
#pragma unroll
    for (int i = 0; i < (GATED ? 2 : 1); i++) coming[i] = __ldg(weights + k + i * up);
  }
  __device__ __forceinline__ void turn(int k, int k_blocks) {
#pragma unroll
    for (int i = 0; i < (GATED ? 2 : 1); i++) own[i] = coming[i];
    load(min(k + 1, k_blocks - 1));
  }
  // Adds the block's sums of 64 rows of weights. rows: scales of a thread's rows, two of each eight
  template <int N>
  __device__ __forceinline__ void add(float (&sum)[MOST / 2], const float (&part)[MOST / 2],
                                      const float (&rows)[MOST / 4]) const {
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[i] += part[i] * (rows[i / 4 * 2 + i % 2] * own[GATED ? i / 2 % 2 : 0]);
  }
};

// Begins the products of a stage's block with 64 rows of weights. asm: registers are not read before they are there.
template <int N>
__device__ __forceinline__ void begin(float (&part)[MOST / 2], u64 weights, u64 rows) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(part[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) Multiply<N>::run(part, weights + WEIGHT_STEP * i, rows + ROW_STEP * i, i);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N, int LEFT>
__device__ __forceinline__ void finish(float (&part)[MOST / 2]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(part[i])::"memory");
}

// As `multiply`, of operands whose blocks have scales. While a block's sums of the first 64 rows of weights are scaled
// and added, the other 64 are multiplied.
template <int N>
__device__ __forceinline__ void multiply_blocks(float (&sum)[2][MOST / 2], Ring& ring, int group, int k_blocks, u32 scales,
                                                Blocks blocks) {
  float part[2][MOST / 2], row[MOST / 4];
#pragma unroll
  for (int i = 0; i < N; i++) sum[i / (N / 2)][i % (N / 2)] = part[i / (N / 2)][i % (N / 2)] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < k_blocks; k++) {
    blocks.turn(k, k_blocks);
    wait(ring.full + 8 * ring.stage, ring.phase);
    if (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // threads wrote it, tensor cores read it
    const u64 rows = operand(ring.at() + WEIGHTS * LINE), weights = operand(ring.at() + group % SHARING * 128 * LINE);
    begin<N>(part[0], weights, rows);
    begin<N>(part[1], weights + (64 * LINE >> 4), rows);
    const u32 at = scales + (ring.stage * MOST + threadIdx.x % 4 * 2) * 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(row[2 * j]), "=f"(row[2 * j + 1]) : "r"(at + 8 * j * 4));
    finish<N, 1>(part[0]);
    blocks.add<N>(sum[0], part[0], row);
    finish<N, 0>(part[1]);
    __syncwarp();  // all lanes have read the rows' scales
    if (threadIdx.x % 32 == 0) arrive(ring.free + 8 * ring.stage);
    blocks.add<N>(sum[1], part[1], row);
    ring.next();
  }
}

// Waits for a tile's last products, and frees the last stage.
template <int N>
__device__ __forceinline__ void finish_all(float (&sum)[2][MOST / 2], u32 freed) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (threadIdx.x % 32 == 0) arrive(freed);
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sum[i / (N / 2)][i % (N / 2)])::"memory");
}

// With PINGPONG a group waits until the other has seen all stages of its tile. Otherwise it might take what a stage held
// two rounds before, in the same phase, for its own.
__device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(GROUPS + 2 + group) : "memory");
}

__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(GROUPS + 2 + (group ^ 1)) : "memory");
}

// Sums of 128 rows of weights: thread's 4 * (row / 8) + 2 * (weight / 8 % 2) + row % 2 of its eight by two. tail: lines
// of the last block along K; more: there is another tile.
template <int N>
__device__ __forceinline__ void multiply(float (&sum)[2][MOST / 2], Ring& ring, int group, int k_blocks, int tail,
                                         bool more) {
  const int whole = OVER_ROWS && tail < DEEP ? k_blocks - 1 : k_blocks;
  int before = 0;
  auto step = [&](int i, int any) {
    const u64 rows = operand(ring.at() + WEIGHTS * LINE), weights = operand(ring.at() + group % SHARING * 128 * LINE);
    Multiply<N>::run(sum[0], weights + WEIGHT_STEP * i, rows + ROW_STEP * i, any);
    Multiply<N>::run(sum[1], weights + WEIGHT_STEP * i + (64 * LINE >> 4), rows + ROW_STEP * i, any);
  };
  auto end = [&](int k) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the stage before has been read
    if (k > 0 && threadIdx.x % 32 == 0) arrive(ring.free + 8 * before);
    before = ring.stage;
    ring.next();
  };
#pragma unroll 1
  for (int k = 0; k < whole; k++) {
    wait(ring.full + 8 * ring.stage, ring.phase);
    if (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // threads wrote it, tensor cores read it
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) step(i, k + i);
    end(k);
  }
  if (OVER_ROWS && whole < k_blocks) {  // the instructions that the last rows need; such a loop in each block is slower
    wait(ring.full + 8 * ring.stage, ring.phase);
    const int steps = max(1, (tail + STEP - 1) / STEP);
    clear_tail(ring.at(), group, (N + 63) / 64, tail, STEP * steps - tail);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
    for (int i = 0; i < steps; i++) step(i, whole + i);
    end(whole);
  }
  if (PINGPONG && more) give_turn(group);
  finish_all<N>(sum, ring.free + 8 * before);
}

// BOX_ROWS rows of a group's results, from row 8 * j on, into their boxes.
__device__ __forceinline__ void stage_step(const float (&sum)[2][MOST / 2], int j, u32 box, const Out& to,
                                           const RowScales& rows, const Channels& channels, float scale,
                                           float factor) {
  const int warp = threadIdx.x / 32 % 4, matrix = threadIdx.x % 32 / 8, line = threadIdx.x % 8;
  float by[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) by[i / 2][i % 2] = (CHANNELS ? 1.0f : scale) * (SCALED_ROWS ? rows.at(j + i / 2, i % 2) : 1.0f);
  // m: 64 rows of weights; next: 8 rows; i: 8 rows of weights, where a gate's `up` is the second; odd: row
  auto value = [&](int m, int next, int i, int odd) {
    const float* own = &sum[m][4 * (j + next) + odd];
    const float one = IN_BYTES == 1 || FACTOR ? by[next][odd] : 1.0f;
    const float result =
        activate(channels.of(own[2 * i], one, m, i), channels.of(own[2], one, m, 1), to.alpha, to.limit);
    return OUT_BYTES == 1 ? result * factor : result;
  };
  auto two = [&](int m, int next, int i) { return two_bf16(value(m, next, i, 0), value(m, next, i, 1)); };
  auto four = [&](int m, int n, int next, int i) {
    return four_e4m3(value(m, next, 0, 0), value(n, next, i, 0), value(m, next, 0, 1), value(n, next, i, 1));
  };
  if constexpr (OUT_BYTES == 4) {  // a lane has two rows, of columns that are eight apart: no bank is written twice
    const int column = 16 * warp + threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
    const u32 first = box + column / 32 * BOX + place(row, column % 32 / 4) + column % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 at = (first ^ (i / 2 * 32 + i % 2 * 16)) + i % 2 * ACROSS;  // eight columns on; the row behind
#pragma unroll
      for (int m = 0; m < 2; m++)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at + 64 / 32 * m * BOX), "f"(value(m, 0, i / 2, i % 2)) : "memory");
    }
  } else if constexpr (OUT_BYTES == 2 && !GATED) {
#pragma unroll
    for (int m = 0; m < 2; m++)
      store_turned(box + m * BOX + place(matrix / 2 * 8 + line, 2 * warp + matrix % 2), two(m, 0, 0), two(m, 0, 1),
                   two(m, 1, 0), two(m, 1, 1));
  } else if constexpr (OUT_BYTES == 2) {
    store_turned(box + place(matrix % 2 * 8 + line, matrix / 2 * 4 + warp), two(0, 0, 0), two(0, 1, 0), two(1, 0, 0),
                 two(1, 1, 0));
  } else if constexpr (!GATED) {
    store_turned(box + place(matrix % 2 * 8 + line, matrix / 2 * 4 + warp), four(0, 0, 0, 1), four(0, 0, 1, 1),
                 four(1, 1, 0, 1), four(1, 1, 1, 1));
  } else {
    store_turned(box + place(matrix % 2 * 8 + line, warp), four(0, 1, 0, 0), four(0, 1, 1, 0));
  }
}

// Adds 16 bytes to those at `at`, where the memory is: nothing waits for what was there. One program adds to a number,
// once, so that the order of programs does not matter.
__device__ __forceinline__ void add(char* at, const uint4& v) {
#if ACCUMULATE
  if constexpr (OUT_BYTES == 2)
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  else
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(__uint_as_float(v.x)),
                 "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)), "f"(__uint_as_float(v.w))
                 : "memory");
#endif
}

// The same instructions for all widths: each with its own would be more than a multiprocessor's instruction cache keeps
// while other kernels run, and fetching them took a fifth of a product's time.
__device__ __forceinline__ void store(const float (&sum)[2][MOST / 2], const Walk& tiles, Out& to, float scale, float factor) {
  RowScales rows;
  if constexpr (SCALED_ROWS) rows.load(to.row_scale, tiles);
  Channels channels;
  if constexpr (CHANNELS || BIASED) channels.load(to, tiles, scale);
  auto stage = [&](int start) {
#pragma unroll
    for (int row = 0; row < CHUNK_ROWS && start + row < MOST; row += BOX_ROWS)
      if (start + row < tiles.width)
        stage_step(sum, (start + row) / 8, to.chunks + to.turn * CHUNK + row * COLUMNS * OUT_BYTES, to, rows, channels, scale,
                   factor);
  };
  stage(0);
#pragma unroll
  for (int start = 0; start < MOST; start += CHUNK_ROWS) {
    if (start >= tiles.width) break;
    const u32 chunk = to.chunks + to.turn * CHUNK;
    to.turn ^= 1;
    asm volatile("bar.sync %0, 128;" ::"r"(to.group + 1) : "memory");  // all have read the other chunk, too
    uint4 values[CHUNK / 16 / 128];
    auto each = [&](auto use) {
      constexpr int PARTS = ACROSS / 16;
#pragma unroll
      for (int i = 0; i < CHUNK / 16 / 128; i++) {
        const int item = threadIdx.x % 128 + i * 128;
        use(values[i], item / (BOXES * PARTS), item / PARTS % BOXES, item % PARTS);
      }
    };
    each([&](uint4& v, int row, int box, int part) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(chunk + (row / BOX_ROWS * BOXES + box) * BOX + place(row % BOX_ROWS, part)));
    });
    stage(start + CHUNK_ROWS);  // while these are on their way
    each([&](const uint4& v, int row, int box, int part) {
      const int column = tiles.first_column(to.group) + (box * ACROSS + part * 16) / OUT_BYTES;
      const u64 line = (u64)(OVER_ROWS ? tiles.expert * tiles.across : 0) + tiles.row + start + row;
      if (start + row < tiles.count && column < to.n) {
        char* const own = AWAY ? (char*)__ldg(to.addresses + line) : to.memory + line * to.n * OUT_BYTES;
        if constexpr (ACCUMULATE)
          add(own + column * OUT_BYTES, v);
        else
          *(uint4*)(own + column * OUT_BYTES) = v;
      }
    });
  }
}

// Where each expert ends, and the number of its first tile; barriers.
__device__ __forceinline__ void prepare(const int* ends, int* first, int* limits, int experts, int rows, int columns,
                                        const Ring& ring, int most, int across) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int base = 0; base < experts; base += 32) {
    const int e = base + lane;
    int tiles = 0;
    if (e < experts) {
      limits[e] = min(ends[e], rows);
      const int own = limits[e] - (e ? min(ends[e - 1], rows) : 0);
      const int all = OVER_ROWS && !(ACCUMULATE && own == 0) ? across : own;
      tiles = (all + most - 1) / most * columns;
    }
    int upto = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    if (e < experts) first[e] = before + upto - tiles;
    before += __shfl_sync(~0u, upto, 31);
  }
  if (lane == 0) {
    first[experts] = before;
    for (int i = 0; i < ring.stages; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ring.full + 8 * i),
                   "r"((GATHER ? COPIERS : 0) + (BLOCKS ? COPIERS / 32 : 0) + 1));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ring.free + 8 * i), "r"(4 * SHARING));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
}

__device__ __forceinline__ void copy_weights(const Map& weights, u32 to, u32 bar, int depth, int unit) {
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4, %3}], "
        "[%5];" ::"r"(to + i * (WEIGHTS * LINE / PIECES)),
        "l"(&weights), "r"(depth), "r"(0), "r"(unit + i * (COLUMNS / UNIT)), "r"(bar)
        : "memory");
}

__device__ __forceinline__ void copy_rows(const Map& rows, u32 to, u32 bar, int depth, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&rows), "r"(depth), "r"(row), "r"(bar)
      : "memory");
}

// A box of 64 numbers, DEEP lines across K, and as many further 64 numbers as the map's box has.
__device__ __forceinline__ void copy_across(const Map& map, u32 to, u32 bar, int line, int unit) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          to),
      "l"(&map), "r"(0), "r"(line), "r"(unit), "r"(bar)
      : "memory");
}

// Rows that threads copy by 16 bytes: eight threads have a line of 128 bytes, and the group STEP lines at once.
struct Gathered {
  const char* memory;  // from this thread's 16 bytes on
  const int* source;
  int row_bytes;
  int line;            // this thread's first
  u32 place;           // of its 16 bytes in a stage, as lines are swizzled
  int rows[MOST / STEP];  // of the tile, that this thread has a part of

  __device__ __forceinline__ Gathered(const char* from, const int* source, int row_bytes) : source(source), row_bytes(row_bytes) {
    const int me = threadIdx.x % 128, part = me % 8;
    memory = from + part * 16;
    line = me / 8;
    place = line * LINE + (part ^ (line & 7)) * 16;
  }
  __device__ __forceinline__ void look_up(const Walk& tiles) {
#pragma unroll
    for (int i = 0; i < MOST / STEP; i++)
      if (i * STEP < tiles.width) rows[i] = __ldg(source + tiles.row + min(line + STEP * i, tiles.count - 1));
  }
  // Of each row the 128 bytes of block k.
  __device__ __forceinline__ void load(const Walk& tiles, u32 to, int k) const {
#pragma unroll
    for (int i = 0; i < MOST / STEP; i++)
      if (i * STEP < tiles.width)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + place + i * STEP * LINE),
                     "l"(memory + ((u64)rows[i] * row_bytes + k * LINE))
                     : "memory");
  }
  __device__ __forceinline__ void arrive(u32 bar) const {  // the barrier is told when they are there
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
  }
};

// scales: of the rows' blocks, `apart` from row to row and `next` from block to block; staged: where a stage has its own
__device__ __forceinline__ void copy(const Map& weights, const Map& wide, const Map& step, Ring& ring, Walk& tiles,
                                     int units, int k_blocks, Gathered gathered, const float* scales, int apart,
                                     int next, u32 staged) {
  const int me = threadIdx.x % 128;
  const bool leads = me == 0;
  ring.phase = 1;  // all stages are free
  while (tiles.next()) {
    const int unit = tiles.expert * units + tiles.column * (COLUMNS * SHARING / UNIT);
    if (OVER_ROWS) k_blocks = tiles.deep();
    if (GATHER) gathered.look_up(tiles);
    const int line = tiles.row + min(me, tiles.count - 1);
    const float* const own = scales + (u64)(BLOCKS && GATHER ? __ldg(gathered.source + line) : line) * apart;
    float scale = BLOCKS ? __ldg(own) : 0.0f;
#pragma unroll 1
    for (int k = 0; k < k_blocks; k++) {
      wait(ring.free + 8 * ring.stage, ring.phase);
      if (BLOCKS) {
        if (me < MOST)
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(staged + (ring.stage * MOST + me) * 4), "f"(scale) : "memory");
        __syncwarp();
        if (me % 32 == 0) arrive(ring.full + 8 * ring.stage);
        scale = __ldg(own + min(k + 1, k_blocks - 1) * next);
      }
      const u32 bar = ring.full + 8 * ring.stage, to = ring.at() + WEIGHTS * LINE;
      const int depth = k * (LINE / IN_BYTES);
      if (GATHER) gathered.load(tiles, to, k), gathered.arrive(bar);
      if (COPIERS > 1 && !leads) {
        ring.next();
        continue;
      }
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                   "r"((WEIGHTS + (GATHER ? 0 : tiles.width)) * LINE)
                   : "memory");
      if (OVER_ROWS) {
        copy_across(weights, ring.at(), bar, tiles.start + k * DEEP, tiles.column * (WEIGHTS / 64));
#pragma unroll 1
        for (int i = 0; i < tiles.width; i += 64) copy_across(wide, to + i * LINE, bar, tiles.start + k * DEEP, (tiles.row + i) / 64);
        ring.next();
        continue;
      }
      if (TURNED)
        copy_across(weights, ring.at(), bar, (tiles.expert * k_blocks + k) * DEEP, tiles.column * (WEIGHTS / 64));
      else
        copy_weights(weights, ring.at(), bar, depth, unit);
      int row = GATHER ? tiles.width : 0;
#pragma unroll 1
      for (; row + WIDE <= tiles.width; row += WIDE) copy_rows(wide, to + row * LINE, bar, depth, tiles.row + row);
#pragma unroll 1
      for (; row < tiles.width; row += STEP) copy_rows(step, to + row * LINE, bar, depth, tiles.row + row);
      ring.next();
    }
  }
}

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

// Part of gemm_grouped.cu: weights of 4 bits, which become bf16, or E4M3 with FP8, in registers, the left operand of the
// tensor cores.
//
// A stage is a block of 128 columns: the tile's rows in boxes of 128 bytes, then 64 bytes of each row of weights,
// as weights/layouts/hopper_4bit.py has them, then its scales. Of a tile with a gated activation all gates come before
// all `up`. Given besides: FP8, INT4 (else E2M1), GROUP columns of a scale, WORDS of scales in a block of a row.
// E2M1 in bf16 is multiplied by its scales, times 2**94, before: sums are in units of 2**-32. In E4M3 it has the scales
// relative to the row's largest. Sums of INT4 are scaled.

constexpr int PACKED = 64;  // bytes of a row of weights in a block
constexpr int TILE_COLUMNS = COLUMNS * GROUPS;
constexpr int STAGE_BOXES = IN_BYTES;  // of 128 bytes along K

#include "numbers_4bit.cu"

template <int N>
struct MultiplyPacked;  // as Multiply, of four registers of weights: 32 bytes along K
// MultiplyPacked<STEP> to MultiplyPacked<MOST>

// Of E2M1 with FP8: the largest exponents of the rows of weights that a thread holds, and the numbers by exponent.
struct RowExponents {
  u32 table;
  int largest[2][2];

#if FP8 && !INT4
  __device__ __forceinline__ void load(u32 numbers, const Channels& rows) {
    table = numbers;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) largest[m][i] = largest_of(rows.own[m][i]);
  }
#endif
};

// Of a stage's weights what a thread holds: 16 bytes and the scales of four rows, two of each 64 of its group's 128.
struct Packed {
  uint4 codes[2];
  u32 scales[2][WORDS];

  __device__ __forceinline__ void load(u32 stage, int most, int group, int m) {
    const int warp = threadIdx.x / 32 % 4, line = threadIdx.x % 32 / 4;
    const u32 at = stage + STAGE_BOXES * most * LINE;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = group * COLUMNS + (GATED ? 32 * m + 8 * warp + line + TILE_COLUMNS * i : 64 * m + 16 * warp + 8 * i + line);
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(codes[i].x), "=r"(codes[i].y), "=r"(codes[i].z), "=r"(codes[i].w)
                   : "r"(at + row * PACKED + threadIdx.x % 4 * 16));
#pragma unroll
      for (int word = 0; word < WORDS; word++)
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(scales[i][word])
                     : "r"(at + WEIGHTS * PACKED + (word * WEIGHTS + row) * 4));
    }
  }
  __device__ __forceinline__ u32 word(int i, int g) const {
    return g == 0 ? codes[i].x : g == 1 ? codes[i].y : g == 2 ? codes[i].z : codes[i].w;
  }
  // 32 columns: steps of four registers. rows: as RowExponents; block: along K
  __device__ __forceinline__ void turn(int g, const RowExponents& rows, int m, int block, u32 (&to)[2 * NUMBERS]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 own[NUMBERS];
#if !FP8
      numbers(word(i, g), scales[i], g, block, own);
#elif INT4
      numbers(word(i, g), own);
#else
      numbers(word(i, g), rows.table, rows.largest[m][i], scales[i], g, own);
#endif
#pragma unroll
      for (int p = 0; p < NUMBERS; p++) to[p / 2 * 4 + p % 2 * 2 + i] = own[p];
    }
  }
  // Of INT4: the scale of a group.
  __device__ __forceinline__ float scale(int i, int g, int block) const {
    const int half = GROUP == 32 ? g % 2 : block % 2;
    const u32 own = scales[i][GROUP == 32 ? g / 2 : 0];
    return __uint_as_float(half ? own & 0xFFFF0000u : own << 16);
  }
};

// Begins the products of 32 columns. more: to the sums, which it begins otherwise
template <int N>
__device__ __forceinline__ void begin_packed(float (&sum)[MOST / 2], u32 (&a)[2 * NUMBERS], u64 rows, int more) {
  MultiplyPacked<N>::run(sum, a[0], a[1], a[2], a[3], rows, more);
#if !FP8
  MultiplyPacked<N>::run(sum, a[4], a[5], a[6], a[7], rows + ALONG, 1);
#endif
}

// The rows of a stage's 32 columns.
__device__ __forceinline__ u64 rows_of(u32 stage, int most, int g) {
  return FP8 ? operand(stage) + g * ALONG : operand(stage + (g / 2) * most * LINE) + g % 2 * 2 * ALONG;
}

// Weights are in their registers from here on, ahead of the fence: the compiler would move what makes them behind it. It
// knows by itself that tensor cores still read those of the products before.
__device__ __forceinline__ void hold(u32 (&a)[2 * NUMBERS]) {
#pragma unroll
  for (int i = 0; i < 2 * NUMBERS; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// As `multiply`. boxes: of 128 bytes, along K
template <int N>
__device__ __forceinline__ void multiply_packed(float (&sum)[2][MOST / 2], Ring& ring, int most, int group, int boxes,
                                                const RowExponents& rows) {
  int before = 0;
#pragma unroll
  for (int i = 0; i < N; i++) sum[i / (N / 2)][i % (N / 2)] = 0.0f;
  constexpr int AT_ONCE = PROGRAMS > 1 && !FP8 ? 1 : 2;  // words
  u32 a[2][AT_ONCE][2 * NUMBERS];  // while one is multiplied, the other is made
#pragma unroll 1
  for (int k = 0; STAGE_BOXES * k < boxes; k++) {
    wait(ring.full + 8 * ring.stage, ring.phase);
    if (GATHER) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // threads wrote it, tensor cores read it
    Packed own[2];
    own[0].load(ring.at(), most, group, 0);
    own[1].load(ring.at(), most, group, 1);
    const bool half = !FP8 && 2 * k + 1 == boxes;
#pragma unroll
    for (int first = 0; first < 4; first += AT_ONCE) {
      if (first >= 2 && half) break;
#pragma unroll
      for (int m = 0; m < 2; m++) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // but for the other 64 rows', all are read
        if (first == 0 && m == 1 && k > 0 && threadIdx.x % 32 == 0) arrive(ring.free + 8 * before);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          own[m].turn(first + i, rows, m, k, a[m][i]);
          hold(a[m][i]);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          if (first + i >= 2 && half) break;
          const int g = first + i;
          begin_packed<N>(sum[m], a[m][i], rows_of(ring.at(), most, g), 1);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
    }
    before = ring.stage;
    ring.next();
  }
  finish_all<N>(sum, ring.free + 8 * before);
}

// The same of INT4 in E4M3: sums of each group, or of a block where all of it is one, are scaled and added. While one half
// of the warps does so, the other multiplies.
template <int N>
__device__ __forceinline__ void multiply_scaled(float (&sum)[2][MOST / 2], Ring& ring, int most, int group, int boxes,
                                                const RowExponents& rows) {
  float part[MOST / 2];
  u32 a[2][2 * NUMBERS];  // while one is multiplied, the other is made
#pragma unroll
  for (int i = 0; i < N; i++) sum[i / (N / 2)][i % (N / 2)] = part[i % (N / 2)] = 0.0f;
#pragma unroll 1
  for (int k = 0; STAGE_BOXES * k < boxes; k++) {
    wait(ring.full + 8 * ring.stage, ring.phase);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      Packed own;
      own.load(ring.at(), most, group, m);
      auto add = [&](int g) {
        finish<N, 0>(part);
#pragma unroll
        for (int i = 0; i < N / 2; i++) sum[m][i] += part[i] * own.scale(i / 2 % 2, g, k);
      };
      own.turn(0, rows, m, k, a[0]);
#pragma unroll
      for (int g = 0; g < 4; g++) {
        hold(a[g % 2]);
        if (GROUP == 32 || g == 0) {
#pragma unroll
          for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(part[i])::"memory");
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        begin_packed<N>(part, a[g % 2], rows_of(ring.at(), most, g), GROUP == 32 ? 0 : g);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (GROUP == 128) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (g < 3) own.turn(g + 1, rows, m, k, a[(g + 1) % 2]);
        if (GROUP == 32) add(g);
      }
      if (GROUP == 128) add(0);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(ring.free + 8 * ring.stage);
    ring.next();
  }
}

__device__ __forceinline__ void copy_bytes(u32 to, const char* from, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar)
               : "memory");
}

// As `copy`. n: columns of out; codes: of all experts; scales: int32 [experts, blocks, WORDS, rows], of INT4's groups of
// 128 columns with a word for two blocks
__device__ __forceinline__ void copy_packed(const Map& wide, const Map& step, Ring& ring, Walk& tiles, int most, int boxes,
                                            int n, Gathered gathered, const char* codes, const char* scales) {
  const bool leads = threadIdx.x % 128 == 0;
  const int blocks = (boxes + STAGE_BOXES - 1) / STAGE_BOXES, all = GATED ? 2 * n : n;
  constexpr int SHARE = GROUP == 128 ? 2 : 1;  // blocks with one word of scales
  const int scale_blocks = (blocks + SHARE - 1) / SHARE;
  ring.phase = 1;  // all stages are free
  while (tiles.next()) {
    const int column = tiles.column * TILE_COLUMNS, count = min(TILE_COLUMNS, n - column);
    const char* const own = codes + ((u64)tiles.expert * blocks * all + column) * PACKED;
    const char* const own_scales = scales + ((u64)tiles.expert * scale_blocks * WORDS * all + column) * 4;
    if (GATHER) gathered.look_up(tiles);
#pragma unroll 1
    for (int k = 0; k < blocks; k++) {
      wait(ring.free + 8 * ring.stage, ring.phase);
      const u32 bar = ring.full + 8 * ring.stage, to = ring.at() + STAGE_BOXES * most * LINE;
      const int here = min(STAGE_BOXES, boxes - STAGE_BOXES * k);
      if (GATHER) {
        for (int box = 0; box < here; box++) gathered.load(tiles, ring.at() + box * most * LINE, STAGE_BOXES * k + box);
        gathered.arrive(bar);
      }
      if (COPIERS > 1 && !leads) {
        ring.next();
        continue;
      }
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                   "r"((GATED ? 2 : 1) * count * (PACKED + 4 * WORDS) + (GATHER ? 0 : here * tiles.width * LINE))
                   : "memory");
#pragma unroll
      for (int i = 0; i < (GATED ? 2 : 1); i++) {
        copy_bytes(to + i * TILE_COLUMNS * PACKED, own + ((u64)k * all + i * n) * PACKED, count * PACKED, bar);
#pragma unroll
        for (int word = 0; word < WORDS; word++)
          copy_bytes(to + WEIGHTS * PACKED + (word * WEIGHTS + i * TILE_COLUMNS) * 4,
                     own_scales + ((u64)(k / SHARE * WORDS + word) * all + i * n) * 4, count * 4, bar);
      }
      for (int box = 0; box < (GATHER ? 0 : here); box++) {
        const u32 at = ring.at() + box * most * LINE;
        const int depth = (STAGE_BOXES * k + box) * (LINE / IN_BYTES);
        int row = 0;
#pragma unroll 1
        for (; row + WIDE <= tiles.width; row += WIDE) copy_rows(wide, at + row * LINE, bar, depth, tiles.row + row);
#pragma unroll 1
        for (; row < tiles.width; row += STEP) copy_rows(step, at + row * LINE, bar, depth, tiles.row + row);
      }
      ring.next();
    }
  }
}

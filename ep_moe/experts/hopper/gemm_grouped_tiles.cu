// Part of gemm_grouped.cu: barriers, the tiles of a program, and the ring of stages.

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

// Both products of few bf16 rows, of fused_4bit.py, in one kernel, with weights of 4 bits as
// weights/layouts/hopper_4bit.py has them: act[p] = activation(w13[e] @ x[p]), y[p] = w2[e] @ act[p] for each route p of a
// local expert e.
//
// Each program sorts the routes by expert. Then all multiply: the work is strips of 16 rows of weights times up to ROWS
// rows of one expert, of which each program has an equal share. A team of warps multiplies a strip; its warps share the
// blocks of 128 columns. Weights go from global memory to the registers that the tensor cores read (mma), AHEAD blocks
// ahead; rows of x lie in shared memory. Between the products all programs wait for each other, with the first weights
// of the second under way.
// Given, besides what warp_weights_4bit.cu wants, which is without FP8: WARPS of a program, AHEAD, ROWS and GATED.
#include "warp_weights_4bit.cu"

constexpr int LINE = 128 * 2;  // bytes of a row of x in a block
constexpr int THREADS = 32 * WARPS;
constexpr int EIGHTS = ROWS / 8;       // of rows, which tensor cores multiply at once
constexpr int SUMS = EIGHTS * 4 * 32;  // of a warp

#include "fused_4bit_sort.cu"

__device__ __forceinline__ void multiply(float (&sum)[4], u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

// Adds a block's products with EACH times eight rows. at: where the lane's line of each eight rows is, in this block's
// first columns; block: along K
template <int EACH>
__device__ __forceinline__ void add_block(float (&sum)[EIGHTS][4], const Block& own, const u32 (&at)[EIGHTS], int block) {
#pragma unroll
  for (int g = 0; g < 4; g++) {
    u32 a[2][NUMBERS];
#pragma unroll
    for (int i = 0; i < 2; i++) numbers(own.word(i, g), own.scales[i], g, block, a[i]);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      u32 x[4];  // of 64 bytes of a row
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(at[n] + block * LINE + g * 64));
      multiply(sum[n], a[0][0], a[1][0], a[0][1], a[1][1], x[0], x[1]);
      multiply(sum[n], a[0][2], a[1][2], a[0][3], a[1][3], x[2], x[3]);
    }
  }
}

// One of the two products, as the host gives it. rows: of an expert's weights, in `blocks`; width: columns of `out`;
// factor: of an expert, or none; bias: of its rows, or none; strips: of an expert; room: rows of x that a program holds;
// every: routes of a row of x
struct Product {
  const char* x;
  const char* codes;
  const u32* scales;
  const float* factor;
  const unsigned short* bias;
  unsigned short* out;
  int depth, rows, width, blocks, strips, room, every;
};

// The warps of a team wait for each other. With one warp a team there may be more teams than barriers, and no need.
__device__ __forceinline__ void team_barrier(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

// Of grid_barrier. One is enough, because a program takes all shared memory: no two launches run at once.
__device__ u32 met;

// All programs wait for each other. The top bit of `met` changes when the last one has come.
__device__ void grid_barrier() {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const u32 own = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    const u32 before = atomicAdd(&met, own);
    u32 now;
    do {
      asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(&met) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
  __syncthreads();
}

// A warp's place in its strips, of whose blocks it has each `split`th.
template <bool FIRST>
struct Place {
  static constexpr int HIGH = FIRST && GATED ? 8 : 16;  // rows of weights from a strip to the next
  int left, tile, strip, block = 0;
  const char* codes;
  const u32* scales;

  // Goes to the first of the team's strips from `begin` to `until`. A team has each `teams`th.
  __device__ __forceinline__ Place(const Product& p, const Sorted& sorted, int begin, int until, int team, int teams)
      : left((until - begin + teams - 1 - team) / teams), tile((begin + team) / p.strips), strip((begin + team) % p.strips) {
    if (left > 0) enter(p, sorted);
  }

  __device__ __forceinline__ void enter(const Product& p, const Sorted& sorted) {
    const int lane = threadIdx.x % 32, first = strip * HIGH + lane / 4, expert = sorted.tile[tile].expert;
    codes = p.codes + ((u64)expert * p.blocks * p.rows + first) * PACKED + lane % 4 * 16;
    scales = p.scales + (u64)expert * ((p.blocks + SHARE - 1) / SHARE) * WORDS * p.rows + first;
  }

  __device__ __forceinline__ void next(const Product& p, const Sorted& sorted, int teams, int split) {
    block += AHEAD * split;
    if (block < p.blocks) return;
    block = 0;
    if (--left <= 0) return;
    strip += teams;
    while (strip >= p.strips) strip -= p.strips, tile++;
    enter(p, sorted);
  }

  __device__ __forceinline__ void load(const Product& p, Block& to, int block) const {
    if (left <= 0 || block >= p.blocks) return;
    const int apart = FIRST && GATED ? p.width : 8;
    const char* const at = codes + (u32)(block * p.rows * PACKED);
    const u32* const scale_at = scales + (u32)(block / SHARE * WORDS * p.rows);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to.codes[i].x), "=r"(to.codes[i].y), "=r"(to.codes[i].z), "=r"(to.codes[i].w)
                   : "l"(at + (i ? apart * PACKED : 0)));
#pragma unroll
      for (int word = 0; word < WORDS; word++)
        asm volatile("ld.global.nc.b32 %0, [%1];"
                     : "=r"(to.scales[i][word])
                     : "l"(scale_at + word * p.rows + (i ? apart : 0)));
    }
  }
};

// Copies rows of x of `held` sorted routes from the `start`th on to shared memory, `step` bytes apart. Columns beyond
// those of x become 0.
__device__ __forceinline__ void copy_rows(const Product& p, const Sorted& sorted, char* room, int start, int held, int step) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < held; row += WARPS) {
    const char* const from = p.x + (u64)(sorted.route[start + row] / p.every) * p.depth * 2;
    for (int byte = lane * 16; byte < p.blocks * LINE; byte += 32 * 16) {
      const bool there = byte < p.depth * 2;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared(room) + row * step + byte),
                   "l"(from + (there ? byte : 0)), "r"(there ? 16 : 0)
                   : "memory");
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Adds the sums of a team's warps in the first one. others: of all warps
__device__ __forceinline__ void add_pieces(float (&sum)[EIGHTS][4], float* others, int team, int teams, int piece, int split) {
  float* const theirs = others + team * SUMS + threadIdx.x % 32;
  team_barrier(team, 32 * split);  // the sums before were read
  if (piece > 0)
    for (int n = 0; n < EIGHTS; n++)
      for (int i = 0; i < 4; i++) theirs[(piece - 1) * teams * SUMS + (n * 4 + i) * 32] = sum[n][i];
  team_barrier(team, 32 * split);
  if (piece == 0)
    for (int other = 0; other < split - 1; other++)
      for (int n = 0; n < EIGHTS; n++)
        for (int i = 0; i < 4; i++) sum[n][i] += theirs[other * teams * SUMS + (n * 4 + i) * 32];
}

// Writes a strip's results. first: the thread's first row of weights, and column of the results
template <bool FIRST>
__device__ __forceinline__ void store(const Product& p, const Sorted& sorted, const Tile& tile, int first,
                                      const float (&sum)[EIGHTS][4], float unit, float alpha, float limit) {
  constexpr bool PAIRED = FIRST && GATED;
  const float scale = p.factor ? unit * __ldg(p.factor + tile.expert) : unit;
  float added[2] = {0.0f, 0.0f};
  if (p.bias)
    for (int i = 0; i < 2; i++) {
      const int row = first + i * (PAIRED ? p.width : 8);
      added[i] = __uint_as_float((u32)__ldg(p.bias + tile.expert * p.rows + row) << 16);
    }
#pragma unroll
  for (int n = 0; n < EIGHTS; n++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int row = n * 8 + threadIdx.x % 4 * 2 + odd;
      if (row >= tile.count) continue;
      const u64 route = sorted.route[tile.first + row];
      const float one = sum[n][odd] * scale + added[0], other = sum[n][2 + odd] * scale + added[1];
#pragma unroll
      for (int i = 0; i < (PAIRED ? 1 : 2); i++) {
        float value = i ? other : one;
        if (FIRST) value = PAIRED ? activate(one, other, alpha, limit) : activate(value, 0.0f, alpha, limit);
        unsigned short bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        p.out[route * p.width + first + 8 * i] = bits;
      }
    }
}

// Multiplies strips `begin` to `end` of one product. waiting: for all programs, before rows of x are read; TEAM: the warps of
// a team if the compiler knows them, which saves up to 8 % of the time, else 0
template <bool FIRST, int TEAM>
__device__ void multiply_strips(const Product& p, const Sorted& sorted, int begin, int end, int any_split, bool waiting,
                                char* room, float* others, float unit, float alpha, float limit) {
  constexpr int HIGH = Place<FIRST>::HIGH;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = TEAM ? TEAM : any_split, teams = WARPS / split;
  const int team = warp % teams, piece = warp / teams;
  const int step = p.blocks * LINE + 16;  // bytes of a row, so that eight rows are in different banks
#pragma unroll 1
  do {
    // the tiles whose rows the program can hold
    int last = begin / p.strips, held = 0, until = begin, start = 0;
    if (begin < end) {
      const int most = (end - 1) / p.strips;
      start = sorted.tile[last].first, held = sorted.tile[last].count;
      while (last < most && held + sorted.tile[last + 1].count <= p.room) held += sorted.tile[++last].count;
      until = min(end, (last + 1) * p.strips);
    }
    Place<FIRST> coming(p, sorted, begin, until, team, teams);
    int own_tile = coming.tile, strip = coming.strip;
    Block next[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) coming.load(p, next[j], piece + split * j);
    if (waiting)
      grid_barrier();  // all rows of x are there
    else
      __syncthreads();  // all have done with the rows before
    waiting = false;
    copy_rows(p, sorted, room, start, held, step);
    __syncthreads();
#pragma unroll 1
    for (int left = coming.left; left > 0; left--) {
      const Tile tile = sorted.tile[own_tile];
      u32 at[EIGHTS];
#pragma unroll
      for (int n = 0; n < EIGHTS; n++)
        at[n] = shared(room) + (tile.first - start + min(n * 8 + lane % 8, tile.count - 1)) * step + lane / 8 * 16;
      float sum[EIGHTS][4] = {};
#pragma unroll 1
      for (int block = 0; block < p.blocks; block += AHEAD * split) {
        coming.next(p, sorted, teams, split);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
          const int here = block + piece + split * j;
          const Block own = next[j];
          coming.load(p, next[j], coming.block + piece + split * j);
          if (here >= p.blocks) continue;
          if (EIGHTS == 1 || tile.count <= 8)
            add_block<1>(sum, own, at, here);
          else
            add_block<EIGHTS>(sum, own, at, here);
        }
      }
      if (split > 1) add_pieces(sum, others, team, teams, piece, split);
      if (piece == 0) store<FIRST>(p, sorted, tile, strip * HIGH + lane / 4, sum, unit, alpha, limit);
      strip += teams;
      while (strip >= p.strips) strip -= p.strips, own_tile++;
    }
    begin = until;
  } while (begin < end);
}

// Multiplies this program's share of strips of one product: rounds of a strip for each warp, and the rest by teams, if that
// saves more than to start again costs, which is about the time of four blocks.
template <bool FIRST>
__device__ void multiply_all(const Product& p, const Sorted& sorted, char* room, float* others, float unit, float alpha,
                             float limit) {
  const int all = sorted.tiles * p.strips, each = all / gridDim.x, over = all % gridDim.x;
  const int begin = blockIdx.x * each + min(blockIdx.x, over), end = begin + each + (blockIdx.x < over);
  // of the largest share, so that a strip's sums have the same order in all programs
  const int most = each + (over > 0), rest = most % WARPS, whole = most - rest;
  int split = 1;
  while (split < 8 && rest > 0 && rest * 2 * split <= WARPS) split *= 2;
  const bool teams = split > 1 && (whole == 0 || p.blocks - (p.blocks + split - 1) / split > 4);
  const int middle = teams ? min(end, begin + whole) : end;
  if (!teams || whole > 0)
    multiply_strips<FIRST, 1>(p, sorted, begin, middle, 1, !FIRST, room, others, unit, alpha, limit);
  if (teams)
    multiply_strips<FIRST, 0>(p, sorted, middle, end, split, !FIRST && whole == 0, room, others, unit, alpha, limit);
}

// ids: of `id_bytes` each, and routing weights or none, of `pairs` routes; every: routes of a row of x; others as of Product
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fused_4bit(const char* x, const char* ids, int id_bytes, const float* routing, const char* codes13,
               const u32* scales13, const float* factor13, const unsigned short* bias13, const char* codes2,
               const u32* scales2, const float* factor2, const unsigned short* bias2, unsigned short* act,
               unsigned short* y, int base, int pairs, int experts, int most_tiles, int every, int hidden, int inner,
               int room13, int room2, float unit, float alpha, float limit) {
  extern __shared__ __align__(128) char memory[];
  int* const tiles = (int*)memory;
  int* const count = tiles + 4;
  int* const any = count + experts + 1;
  int* const route = any + pairs;
  Tile* const tile = (Tile*)(route + pairs);
  float* const others = (float*)(memory + ((char*)(tile + most_tiles) - memory + 127) / 128 * 128);
  char* const room = (char*)(others + (WARPS - 1) * SUMS);
  const int found = sort_routes(ids, id_bytes, routing, base, pairs, experts, count, any, route, tile, tiles);
  const Sorted sorted{route, tile, found};
  const Product first{x, codes13, scales13, factor13, bias13, act, hidden, GATED ? 2 * inner : inner, inner,
                      (hidden + 127) / 128, inner / (GATED ? 8 : 16), room13, every};
  multiply_all<true>(first, sorted, room, others, unit, alpha, limit);
  const Product second{(const char*)act, codes2, scales2, factor2, bias2, y, inner, hidden, hidden,
                       (inner + 127) / 128, hidden / 16, room2, 1};
  multiply_all<false>(second, sorted, room, others, unit, alpha, limit);
}

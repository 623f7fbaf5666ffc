// Part of fused_4bit.cu: the routes of each expert, in tiles of up to ROWS.

constexpr int MOST_ROUTES = 1024;

// Up to ROWS rows of an expert. first: the first of them in the sorted routes
struct Tile {
  int expert, first, count;
};

struct Sorted {
  const int* route;
  const Tile* tile;
  int tiles;
};

// Sorts routes by expert, and returns the number of tiles. count: of each expert and 1 more; any: of each route; tiles: 2;
// to and tile: the result. threads: all
__device__ int sort_routes(const char* ids, int id_bytes, const float* routing, int base, int pairs, int experts,
                           int* count, int* any, int* to, Tile* tile, int* tiles) {
  constexpr int MOST = (MOST_ROUTES + THREADS - 1) / THREADS;  // of a thread
  int own[MOST], place[MOST];
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int pair = threadIdx.x + i * THREADS;
    own[i] = -1;
    if (pair < pairs) {
      own[i] = __ldg((const int*)(ids + pair * id_bytes)) - base;
      if (routing && __ldg(routing + pair) == 0.0f) own[i] = -1;
    }
  }
  for (int i = threadIdx.x; i < experts; i += THREADS) count[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MOST; i++)
    if (own[i] >= 0 && own[i] < experts) place[i] = atomicAdd(count + own[i], 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int rows = 0, all = 0;  // of the experts before
    bool several = false;   // tiles of an expert
    for (int first = 0; first < experts; first += 32) {
      const int expert = first + lane, mine = expert < experts ? count[expert] : 0, needed = (mine + ROWS - 1) / ROWS;
      several |= needed > 1;
      int sum = mine | needed << 16;  // both sums at once
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const int start = rows + (sum & 0xFFFF) - mine, at = all + (sum >> 16) - needed;
      for (int i = 0; i < needed; i++) tile[at + i] = {expert, start + i * ROWS, min(ROWS, mine - i * ROWS)};
      if (expert < experts) count[expert] = start;
      sum = __shfl_sync(~0u, sum, 31);
      rows += sum & 0xFFFF, all += sum >> 16;
    }
    if (lane == 0) tiles[0] = all, count[experts] = rows;
    several = __any_sync(~0u, several);
    if (lane == 0) tiles[1] = several;
  }
  __syncthreads();
  // with one tile each, the order within an expert does not matter; else all programs need the same tiles
  int* const found = tiles[1] ? any : to;
#pragma unroll
  for (int i = 0; i < MOST; i++)
    if (own[i] >= 0 && own[i] < experts) found[count[own[i]] + place[i]] = threadIdx.x + i * THREADS;
  __syncthreads();
  if (tiles[1]) {
#pragma unroll
    for (int i = 0; i < MOST; i++)
      if (own[i] >= 0 && own[i] < experts) {
        const int pair = threadIdx.x + i * THREADS, start = count[own[i]], end = count[own[i] + 1];
        int rank = 0;
        for (int other = start; other < end; other++) rank += any[other] < pair;
        to[start + rank] = pair;
      }
    __syncthreads();
  }
  return *tiles;
}

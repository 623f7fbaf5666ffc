// Part of gemm_grouped.cu: operands from memory to the ring of stages, by the group that copies.

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

// Part of gemm_grouped.cu: the products of a tile, by the groups that multiply.

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

// Part of gemm_grouped.cu: results of a tile from registers to memory, scaled and activated.

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

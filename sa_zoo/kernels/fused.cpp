// out = sum_h P_h X W_val_h^T + b_val for P_h = P_down_h (x) P_across_h, a few rows of pixels at a time; for fused.py.
//
//     X          (B, H, W, D)        P_down    (N_h, H, H)
//     out        (B, H, W, N)        P_across  (N_h, W, W)
//     W_val      (N, N_h D)          b_val     (N)
//
// The (T, N_h D) tensor of P_h X for all heads never exists: P_h X of one head, for a tile of a few rows, stays in a
// core's own cache and is projected from there before the next head is evaluated.
//
// Every product is made of blocks of up to ROWS rows and VECTORS vectors, whose sums are held in registers: 25 of the
// 32 that AVX-512 has, and 5 for a row of the right factor (after Goto, van de Geijn, "Anatomy of High-Performance
// Matrix Multiplication", TOMS 2008). D and N have to be multiples of LANES.

#include <cstddef>
#include <utility>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int ROWS = 5;
constexpr int VECTORS = 5;

using Index = std::ptrdiff_t;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

// A matrix: rows of numbers, `stride` apart, from `first` on.
template <typename Number>
struct Rows {
  Number* first;
  Index stride;
};

struct Span {
  int first, last;  // half-open: without `last`

  int length() const { return last - first; }
  Span operator*(int factor) const { return {first * factor, last * factor}; }
};

// Splits `whole` into the fewest parts of at most `most` each; their sizes differ by at most one.
int parts(int whole, int most) { return (whole + most - 1) / most; }
Span part(int whole, int count, int index) {
  return {static_cast<int>(Index(whole) * index / count), static_cast<int>(Index(whole) * (index + 1) / count)};
}

// out (+)= a b for M rows of a and V vectors of b, summed over k: columns of a, rows of b. The loops are unrolled
// because sums that are accessed by an index would lie in memory.
template <int M, int V, bool ADD>
void block(Rows<const float> a, Rows<const float> b, Rows<float> out, Span k) {
  Vector sum[M][V] = {};
  const float* row = b.first + k.first * b.stride;
  for (int i = k.first; i < k.last; ++i, row += b.stride) {
    Vector right[V];
#pragma GCC unroll VECTORS
    for (int v = 0; v < V; ++v) right[v] = *reinterpret_cast<const Vector*>(row + v * LANES);
#pragma GCC unroll ROWS
    for (int m = 0; m < M; ++m) {
      const float left = a.first[m * a.stride + i];
#pragma GCC unroll VECTORS
      for (int v = 0; v < V; ++v) sum[m][v] += left * right[v];
    }
  }
#pragma GCC unroll ROWS
  for (int m = 0; m < M; ++m)
#pragma GCC unroll VECTORS
    for (int v = 0; v < V; ++v) {
      Vector* place = reinterpret_cast<Vector*>(out.first + m * out.stride + v * LANES);
      *place = ADD ? *place + sum[m][v] : sum[m][v];
    }
}

using Block = void (*)(Rows<const float>, Rows<const float>, Rows<float>, Span);

template <bool ADD, std::size_t... I>
Block block_of(int rows, int columns, std::index_sequence<I...>) {
  static constexpr Block blocks[] = {block<I / VECTORS + 1, I % VECTORS + 1, ADD>...};
  return blocks[(rows - 1) * VECTORS + columns / LANES - 1];
}

template <bool ADD>
Block block_of(int rows, int columns) {
  return block_of<ADD>(rows, columns, std::make_index_sequence<ROWS * VECTORS>{});
}

// The range of columns that holds all nonzero probabilities of some rows: far from a head they are exactly zero.
Span reach(Rows<const float> P, Span rows, int columns) {
  const auto empty = [&](int column) {
    for (int row = rows.first; row < rows.last; ++row)
      if (P.first[row * P.stride + column] != 0) return false;
    return true;
  };
  Span found{0, columns};
  while (found.last > found.first && empty(found.last - 1)) --found.last;
  while (found.first < found.last && empty(found.first)) ++found.first;
  return found;
}

struct Layer {
  const float *X, *P_down, *P_across, *W_val, *b_val;
  float *out, *packed;
  int H, W, D, N, N_h;
  std::vector<Span> across;  // of each head and block of queries in a row, what P_across reaches

  int blocks_across() const { return parts(W, ROWS); }

  int panels() const { return parts(N / LANES, VECTORS); }
  Span panel(int index) const { return part(N / LANES, panels(), index) * LANES; }
  // The weights of a head and a panel, (D, columns of the panel), are contiguous, in the order in which they are read.
  float* weights(int h, Span columns) const { return packed + Index(D) * (Index(N) * h + columns.first); }
};

void pack(const Layer& layer, int h, Span columns) {
  const int width = columns.length();
  for (int first = 0; first < layer.D; first += LANES) {  // one cache line of each row at a time
    float* place = layer.weights(h, columns) + Index(first) * width;
    for (int n = 0; n < width; ++n) {
      const float* from = layer.W_val + Index(layer.D) * (Index(columns.first + n) * layer.N_h + h) + first;
      for (int c = 0; c < LANES; ++c) place[c * width + n] = from[c];
    }
  }
}

// Memory that a thread needs for a tile of `height` rows.
struct Room {
  float* down;   // (height, W, VECTORS * LANES): P_down X for some channels
  float* heads;  // (height, W, D): P_h X of one head

  static Index numbers(int height, int W, int D) { return Index(height) * W * (VECTORS * LANES + D); }
  Room(float* memory, int height, int W) : down(memory), heads(memory + Index(height) * W * VECTORS * LANES) {}
};

// heads = P_h X for the queries of some rows.
void attend(const Layer& layer, const float* X, Span rows, int h, const Room& room) {
  const int H = layer.H, W = layer.W, D = layer.D, Q = rows.length();
  const Rows<const float> P_down{layer.P_down + (Index(h) * H + rows.first) * H, H};
  const Rows<const float> P_across{layer.P_across + Index(h) * W * W, W};
  const int blocks_down = parts(Q, ROWS), blocks_across = layer.blocks_across(), groups = parts(D / LANES, VECTORS);
  for (int group = 0; group < groups; ++group) {
    const Span channels = part(D / LANES, groups, group) * LANES;
    const int width = channels.length();
    for (int i = 0; i < blocks_down; ++i) {
      const Span q = part(Q, blocks_down, i), reached = reach(P_down, q, H);
      for (int x = 0; x < W; ++x)
        block_of<false>(q.length(), width)({P_down.first + q.first * P_down.stride, H},
                                           {X + Index(x) * D + channels.first, Index(W) * D},
                                           {room.down + (Index(q.first) * W + x) * width, Index(W) * width},
                                           reached);
    }
    for (int i = 0; i < blocks_across; ++i) {
      const Span q = part(W, blocks_across, i);
      for (int y = 0; y < Q; ++y)
        block_of<false>(q.length(), width)({P_across.first + q.first * P_across.stride, W},
                                           {room.down + Index(y) * W * width, width},
                                           {room.heads + (Index(y) * W + q.first) * D + channels.first, D},
                                           layer.across[h * blocks_across + i]);
    }
  }
}

void tile(const Layer& layer, Index image, Span rows, const Room& room) {
  const int pixels = rows.length() * layer.W, D = layer.D, N = layer.N, blocks = parts(pixels, ROWS);
  const float* X = layer.X + image * layer.H * layer.W * D;
  float* out = layer.out + (image * layer.H + rows.first) * layer.W * N;
  for (int pixel = 0; pixel < pixels; ++pixel)
    for (int n = 0; n < N; ++n) out[Index(pixel) * N + n] = layer.b_val[n];
  for (int h = 0; h < layer.N_h; ++h) {
    attend(layer, X, rows, h, room);
    for (int panel = 0; panel < layer.panels(); ++panel) {
      const Span columns = layer.panel(panel);
      for (int i = 0; i < blocks; ++i) {
        const Span q = part(pixels, blocks, i);
        block_of<true>(q.length(), columns.length())({room.heads + Index(q.first) * D, D},
                                                    {layer.weights(h, columns), columns.length()},
                                                    {out + Index(q.first) * N + columns.first, N}, {0, D});
      }
    }
  }
}

}  // namespace

extern "C" {

// Floats of memory that each thread needs.
std::ptrdiff_t sa_zoo_room(int height, int W, int D) { return Room::numbers(height, W, D); }

// packed: memory for as many numbers as W_val has. rooms: for threads * sa_zoo_room(height, W, D).
void sa_zoo_fused_values(const float* X, const float* P_down, const float* P_across, const float* W_val,
                         const float* b_val, float* out, float* packed, float* rooms, int B, int H, int W, int D, int N,
                         int N_h, int height, int threads) {
  Layer layer{X, P_down, P_across, W_val, b_val, out, packed, H, W, D, N, N_h, {}};
  for (int h = 0; h < N_h; ++h)
    for (int i = 0; i < layer.blocks_across(); ++i)
      layer.across.push_back(reach({P_across + Index(h) * W * W, W}, part(W, layer.blocks_across(), i), W));
  const int panels = layer.panels(), tiles = parts(H, height);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic)
    for (int i = 0; i < N_h * panels; ++i) pack(layer, i / panels, layer.panel(i % panels));
    float* memory;
#pragma omp critical(sa_zoo_rooms)
    {
      memory = rooms;
      rooms += Room::numbers(height, W, D);
    }
    const Room room(memory, height, W);
#pragma omp for schedule(dynamic)
    for (Index i = 0; i < Index(B) * tiles; ++i)
      tile(layer, i / tiles, part(H, tiles, static_cast<int>(i % tiles)), room);
  }
}

}  // extern "C"

// A tile: the piece of a row that is held in registers. Four vectors wide, so that every sum over a row runs in four
// accumulators and does not wait for itself. Compiler vectors, not intrinsics: the same code serves any instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace attnres {

constexpr int kVectorBytes = 64;

template <class A>
struct Vectors;
template <>
struct Vectors<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef float Loose __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct Vectors<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef double Loose __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};

// The sum over the lanes, by halves.
inline float sum_lanes(Vectors<float>::Type v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
}
inline double sum_lanes(Vectors<double>::Type v) {
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}

// Four names and not an array: the compiler keeps names in registers.
template <class A>
struct Tile {
  using Vector = typename Vectors<A>::Type;
  using Loose = typename Vectors<A>::Loose;
  static constexpr int64_t lanes = kVectorBytes / sizeof(A);
  static constexpr int64_t width = 4 * lanes;
  Vector a{}, b{}, c{}, d{};

  // this += scale * other
  void add(A scale, const Tile& other) {
    a += scale * other.a;
    b += scale * other.b;
    c += scale * other.c;
    d += scale * other.d;
  }
  // this += x * y, element by element
  void add(const Tile& x, const Tile& y) {
    a += x.a * y.a;
    b += x.b * y.b;
    c += x.c * y.c;
    d += x.d * y.d;
  }
  void add(const Tile& other) {
    a += other.a;
    b += other.b;
    c += other.c;
    d += other.d;
  }
  void multiply(const Tile& other) {
    a *= other.a;
    b *= other.b;
    c *= other.c;
    d *= other.d;
  }
  void scale(A factor) {
    a *= factor;
    b *= factor;
    c *= factor;
    d *= factor;
  }
  // Always in the same order, so that a row's result does not depend on where it is computed.
  A sum() const { return sum_lanes((a + b) + (c + d)); }

  void read(const A* from) {
    const Loose* vectors = reinterpret_cast<const Loose*>(from);
    a = vectors[0];
    b = vectors[1];
    c = vectors[2];
    d = vectors[3];
  }
  void write(A* to) const {
    Loose* vectors = reinterpret_cast<Loose*>(to);
    vectors[0] = a;
    vectors[1] = b;
    vectors[2] = c;
    vectors[3] = d;
  }
};

// A row of the kernel's own: in the order of tiles, padded with zeros to whole tiles.
template <class A>
inline Tile<A> load(const A* line, int64_t d) {
  Tile<A> tile;
  tile.read(line + d);
  return tile;
}
template <class A>
inline void store(const Tile<A>& tile, A* line, int64_t d) {
  tile.write(line + d);
}
template <class A>
constexpr int64_t padded(int64_t dim) {
  return (dim + Tile<A>::width - 1) / Tile<A>::width * Tile<A>::width;
}
// From one line to the next: an odd number of cache lines, so that the same tile of many lines does not fall on the same
// few places of the nearest cache.
template <class A>
constexpr int64_t pitch(int64_t dim) {
  return padded<A>(dim) + Tile<A>::lanes;
}

// Storage for lines, on cache lines.
template <class T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(kVectorBytes)));
  }
  void deallocate(T* data, size_t) { ::operator delete(data, std::align_val_t(kVectorBytes)); }
  bool operator==(const Aligned&) const { return true; }
};
template <class A>
using Lines = std::vector<A, Aligned<A>>;

// How many elements of a tile a row has: all of them, known to the compiler, or its rest.
template <class A>
struct Whole {
  static constexpr bool whole = true;
  static constexpr int64_t count = Tile<A>::width;
};
struct Rest {
  static constexpr bool whole = false;
  int64_t count;
};

// Calls f(offset, extent) for each tile of a row.
template <class A, class F>
inline void for_tiles(int64_t dim, F&& f) {
  int64_t d = 0;
  for (; d + Tile<A>::width <= dim; d += Tile<A>::width) f(d, Whole<A>{});
  if (d < dim) f(d, Rest{dim - d});
}

}  // namespace attnres

// How a tile's elements lie in it, and the way between tiles and rows of tensors.
//
// Plain: as in memory; rows are of the working type. Split: even elements in one vector, odd ones in the next. A vector
// of memory then holds the two bfloat16 vectors of a tile side by side, and widening them is one shift and one mask
// instead of a walk across lanes; rows of float32 are permuted on their way.
#pragma once

#include "tile.h"

namespace attnres {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the split layout takes the even element from the low half");

struct Single {
  using Number = float;
  static constexpr bool split = false;
};
struct Mixed {
  using Number = float;
  static constexpr bool split = true;
};
struct Double {
  using Number = double;
  static constexpr bool split = false;
};
template <class P>
using Number = typename P::Number;

// One row of a tensor: of the working type, or with the split layout of bfloat16 when `half`.
template <class P>
struct Row {
  const char* data;
  bool half;
};
template <class P>
struct Sink {
  char* data;
  bool half;
  bool streamed;  // aligned, and too large for the cache: written past it, so that no line is fetched to be overwritten
};

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint32_t LooseWords __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));

template <class V>
inline void put(const V& vector, void* target, bool streamed) {
#ifdef __AVX512F__
  if (streamed) {
    _mm512_stream_si512(static_cast<__m512i*>(target), (__m512i)vector);
    return;
  }
#endif
  std::memcpy(target, &vector, sizeof vector);
}

// What went past the cache is visible to other threads from here on.
inline void finish_streams() {
#ifdef __AVX512F__
  _mm_sfence();
#endif
}

inline Tile<float> widen(const void* source) {
  using Floats = Tile<float>::Vector;
  const LooseWords* words = static_cast<const LooseWords*>(source);
  const Words first = words[0], second = words[1];
  Tile<float> tile;
  tile.a = (Floats)(first << 16);
  tile.b = (Floats)(first & 0xffff0000u);
  tile.c = (Floats)(second << 16);
  tile.d = (Floats)(second & 0xffff0000u);
  return tile;
}

// Rounds to nearest even, in the upper half of each word; a NaN stays a NaN.
inline Words round_to_half(Tile<float>::Vector vector) {
  const Words bits = (Words)vector;
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return vector != vector ? Words{} + 0x7fc00000u : rounded;
}

inline void narrow(const Tile<float>& tile, void* target, bool streamed) {
  put(round_to_half(tile.a) >> 16 | (round_to_half(tile.b) & 0xffff0000u), target, streamed);
  put(round_to_half(tile.c) >> 16 | (round_to_half(tile.d) & 0xffff0000u), static_cast<Words*>(target) + 1, streamed);
}

// A vector as it is when it has been written in bfloat16 and read again.
inline Tile<float>::Vector through_half(Tile<float>::Vector vector) {
  return (Tile<float>::Vector)(round_to_half(vector) & 0xffff0000u);
}

inline void to_split(Tile<float>& t) {
  const auto a = t.a, b = t.b, c = t.c, d = t.d;
  t.a = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  t.b = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  t.c = __builtin_shufflevector(c, d, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  t.d = __builtin_shufflevector(c, d, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

inline void from_split(Tile<float>& t) {
  const auto a = t.a, b = t.b, c = t.c, d = t.d;
  t.a = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  t.b = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  t.c = __builtin_shufflevector(c, d, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  t.d = __builtin_shufflevector(c, d, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

template <class P>
inline Tile<Number<P>> load_whole(const char* from, bool half) {
  if constexpr (P::split)
    if (half) return widen(from);
  Tile<Number<P>> tile;
  tile.read(reinterpret_cast<const Number<P>*>(from));
  if constexpr (P::split) to_split(tile);
  return tile;
}

template <class P>
inline void store_whole(Tile<Number<P>> tile, char* to, bool half, bool streamed) {
  if constexpr (P::split) {
    if (half) return narrow(tile, to, streamed);
    from_split(tile);
  }
  put(tile.a, to, streamed);
  put(tile.b, to + kVectorBytes, streamed);
  put(tile.c, to + 2 * kVectorBytes, streamed);
  put(tile.d, to + 3 * kVectorBytes, streamed);
}

template <class P>
constexpr int64_t element_bytes(bool half) {
  return P::split && half ? sizeof(uint16_t) : sizeof(Number<P>);
}

// Elements past the row's end are zeros.
template <class P, class E>
inline Tile<Number<P>> load(Row<P> row, int64_t d, E extent) {
  const int64_t size = element_bytes<P>(row.half);
  if constexpr (E::whole) return load_whole<P>(row.data + d * size, row.half);
  char buffer[4 * kVectorBytes] = {};
  std::memcpy(buffer, row.data + d * size, extent.count * size);
  return load_whole<P>(buffer, row.half);
}

template <class P, class E>
inline void store(const Tile<Number<P>>& tile, Sink<P> sink, int64_t d, E extent) {
  const int64_t size = element_bytes<P>(sink.half);
  if constexpr (E::whole) return store_whole<P>(tile, sink.data + d * size, sink.half, sink.streamed);
  char buffer[4 * kVectorBytes];
  store_whole<P>(tile, buffer, sink.half, false);
  std::memcpy(sink.data + d * size, buffer, extent.count * size);
}

// Rounds to the type of a row.
template <class P>
inline void round_as(Tile<Number<P>>& tile, bool half) {
  if constexpr (P::split) {
    if (!half) return;
    tile.a = through_half(tile.a);
    tile.b = through_half(tile.b);
    tile.c = through_half(tile.c);
    tile.d = through_half(tile.d);
  }
}

// Ask for a tile of a row that will be read soon. Only a hint: it may point past the end.
template <class P>
inline void prefetch(Row<P> row, int64_t d) {
  const int64_t size = element_bytes<P>(row.half);
  const char* from = row.data + d * size;
  for (int64_t byte = 0; byte < Tile<Number<P>>::width * size; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

}  // namespace attnres

// Rows in memory, of a dtype known at compile time or (`any`) at run time. Included after a vec-inl.h, which defines `real`, `vec`,
// W, the operations, and EACH_TYPE: the dtypes that its arithmetic reads and writes.

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// W elements at p; with PART only the first n, then zeros.
template <bool PART, class T>
INLINE vec load_some(const T* p, int64_t n) {
  return PART ? load(p, n) : load(p);
}
template <bool PART, class T>
INLINE void store_some(T* p, vec a, int64_t n) {
  if (PART) store(p, a, n);
  else store(p, a);
}

// Two vectors at p: a pair if the instruction set has them and `PAIR`, else 2 W consecutive elements.
template <bool PAIR, class T>
INLINE void load_both(const T* p, vec* t) {
  if constexpr (PAIR) load_pair(p, t);
  else {
    t[0] = load(p);
    t[1] = load(p + W);
  }
}
template <bool PAIR, class T>
INLINE void store_both(T* p, const vec* t) {
  if constexpr (PAIR) store_pair(p, t);
  else {
    store(p, t[0]);
    store(p + W, t[1]);
  }
}

template <class T>
struct In {
  const T* p = nullptr;

  In() = default;
  In(const void* base, Type, int64_t at) : p(base != nullptr ? static_cast<const T*>(base) + at : nullptr) {}
  explicit operator bool() const { return p != nullptr; }
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    return load_some<PART>(p + i, n);
  }
  // Two vectors: a pair, or 2 W consecutive elements.
  template <bool PAIR>
  INLINE void get_two(int64_t i, vec* t) const {
    load_both<PAIR>(p + i, t);
  }
  INLINE void prefetch(int64_t i) const { __builtin_prefetch(p + i); }
};

template <class T>
struct Out {
  T* p = nullptr;

  Out() = default;
  Out(void* base, Type, int64_t at) : p(base != nullptr ? static_cast<T*>(base) + at : nullptr) {}
  explicit operator bool() const { return p != nullptr; }
  template <bool PART>
  INLINE void set(int64_t i, vec a, int64_t n) const {
    store_some<PART>(p + i, a, n);
  }
  // Store a and return it rounded to the dtype of the memory.
  template <bool PART>
  INLINE vec write(int64_t i, vec a, int64_t n) const {
    return PART ? store_rounded(p + i, a, n) : store_rounded(p + i, a);
  }
  template <bool PAIR>
  INLINE void write_two(int64_t i, vec* t) const {
    if constexpr (PAIR) store_pair_rounded(p + i, t);
    else
      for (int u = 0; u < 2; ++u) t[u] = store_rounded(p + i + u * W, t[u]);
  }
};

// The same for a dtype that is known only at run time: one branch, always predicted, per load or store.
template <>
struct In<any> {
  const char* p = nullptr;
  Type type = Type::f32;

  In() = default;
  In(const void* base, Type t, int64_t at) : p(base != nullptr ? static_cast<const char*>(base) + at * size_of(t) : nullptr), type(t) {}
  explicit operator bool() const { return p != nullptr; }
  template <bool PART>
  INLINE vec get(int64_t i, int64_t n) const {
    switch (type) {
#define CASE(name, T) \
  case Type::name:    \
    return load_some<PART>(reinterpret_cast<const T*>(p) + i, n);
      EACH_TYPE(CASE)
#undef CASE
      default: __builtin_unreachable();
    }
  }
  template <bool PAIR>
  INLINE void get_two(int64_t i, vec* t) const {
    for (int u = 0; u < 2; ++u) t[u] = get<false>(i + u * W, W);
  }
  INLINE void prefetch(int64_t i) const { __builtin_prefetch(p + i * size_of(type)); }
};

template <>
struct Out<any> {
  char* p = nullptr;
  Type type = Type::f32;

  Out() = default;
  Out(void* base, Type t, int64_t at) : p(base != nullptr ? static_cast<char*>(base) + at * size_of(t) : nullptr), type(t) {}
  explicit operator bool() const { return p != nullptr; }
  template <bool PART>
  INLINE void set(int64_t i, vec a, int64_t n) const {
    write<PART>(i, a, n);
  }
  template <bool PART>
  INLINE vec write(int64_t i, vec a, int64_t n) const {
    switch (type) {
#define CASE(name, T)                                  \
  case Type::name: {                                   \
    T* to = reinterpret_cast<T*>(p) + i;               \
    return PART ? store_rounded(to, a, n) : store_rounded(to, a);          \
  }
      EACH_TYPE(CASE)
#undef CASE
      default: __builtin_unreachable();
    }
  }
  template <bool PAIR>
  INLINE void write_two(int64_t i, vec* t) const {
    for (int u = 0; u < 2; ++u) t[u] = write<false>(i + u * W, t[u], W);
  }
};

// Return a rounded to a dtype.
INLINE vec round_to(vec a, Type type) {
  double buffer[W];
  return Out<any>(buffer, type, 0).template write<false>(0, a, W);
}

// The dropout mask of a row, as bits (philox-inl.h); a null pointer keeps every element.
struct Mask {
  const unsigned char* bits = nullptr;
  int shift = 0;
  vec scale;

  Mask() : scale(fill(1)) {}
  // Make the mask of row `index` in `scratch`.
  void make(const AddOptions& add, int64_t index, int64_t d, unsigned char* scratch) {
    if (!add.dropout) return;
    const uint64_t first = static_cast<uint64_t>(index) * static_cast<uint64_t>(d);
    keep_bits(add, first, d, scratch);
    bits = scratch;
    shift = static_cast<int>(first & 3);
    scale = fill(static_cast<real>(add.keep_scale));
  }
  explicit operator bool() const { return bits != nullptr; }
  // A dropped element is 0 even if it was infinite.
  INLINE vec apply(vec a, int64_t i) const {
    uint32_t word;
    __builtin_memcpy(&word, bits + (i >> 3), 4);
    return select(word >> ((i & 7) + shift), mul(a, scale));
  }
};

// The forward: which loops compute the rows. Included after overlap-inl.h.
//
// A row is stored in z, or in scratch if z is not requested. The dtypes that models use without options have loops of their own; all
// others use one loop with `any`. The arithmetic of a row does not depend on other rows, nor on whether one or two rows are computed
// at a time.

using ReadRow = Moments (*)(const Forward&, int64_t, void*, unsigned char*);
using WriteRows = void (*)(const Forward&, int64_t, void* const*, const Moments*);

template <class Source, class Z, template <class> class RowSums = WideSums>
ReadRow pick_norm(Norm norm) {
  return with_norm(norm, [](auto type) -> ReadRow { return read_row<Source, Z, decltype(type), RowSums>; });
}

// The dtypes of residual, branch and z as one number.
constexpr int code(Type a, Type b, Type c = Type::f32) {
  return static_cast<int>(a) + kTypes * static_cast<int>(b) + kTypes * kTypes * static_cast<int>(c);
}

ReadRow pick_read(const Forward& a) {
  const Type r = a.residual_type, b = a.branch_type;
  if constexpr (!kWide) {
    const bool one_dtype = a.branch == nullptr || (b == r && a.z_type == r);
    if (a.short_sums && one_dtype) {
      if (a.branch == nullptr) {
        if (r == Type::bf16) return pick_norm<NormOnly<bf16>, bf16, ShortSums>(a.norm);
        return r == Type::f16 ? pick_norm<NormOnly<f16>, f16, ShortSums>(a.norm) : pick_norm<NormOnly<float>, float, ShortSums>(a.norm);
      }
      if (a.add.is_default && r == Type::bf16) return pick_norm<PlainSum<bf16, bf16>, bf16, ShortSums>(a.norm);
      if (a.add.is_default && r == Type::f16) return pick_norm<PlainSum<f16, f16>, f16, ShortSums>(a.norm);
      if (r == Type::bf16) return pick_norm<ScaledSum<bf16>, bf16, ShortSums>(a.norm);
    } else if (!a.short_sums && r == Type::f32 && a.z_type == Type::f32) {
      if (a.branch == nullptr) return pick_norm<NormOnly<float>, float>(a.norm);
      if (a.add.is_default && b == Type::f32) return pick_norm<PlainSum<float, float>, float>(a.norm);
      if (a.add.is_default && b == Type::bf16) return pick_norm<PlainSum<float, bf16>, float>(a.norm);
      if (b == Type::f32) return pick_norm<ScaledSum<float>, float>(a.norm);
    }
    if (a.short_sums) return a.branch == nullptr ? pick_norm<NormOnly<any>, any, ShortSums>(a.norm) : pick_norm<ScaledSum<any>, any, ShortSums>(a.norm);
  }
  return a.branch == nullptr ? pick_norm<NormOnly<any>, any>(a.norm) : pick_norm<ScaledSum<any>, any>(a.norm);
}

template <class Z, class Y, int N>
WriteRows pick_bias(const Forward& a) {
  return a.bias != nullptr ? write_rows<Z, Y, true, N> : write_rows<Z, Y, false, N>;
}

template <int N>
WriteRows pick_write(const Forward& a) {
  if constexpr (!kWide) {
    if (!a.round_x_hat) {
      const int dtypes = code(a.z_type, a.y_type);
      if (dtypes == code(Type::f32, Type::f32)) return pick_bias<float, float, N>(a);
      if (dtypes == code(Type::bf16, Type::bf16)) return pick_bias<bf16, bf16, N>(a);
      if (dtypes == code(Type::f16, Type::f16)) return pick_bias<f16, f16, N>(a);
      if (dtypes == code(Type::f32, Type::bf16)) return pick_bias<float, bf16, N>(a);
    }
  }
  return pick_bias<any, any, N>(a);
}

void forward(const Forward& a, int64_t begin, int64_t end, void* scratch) {
  if constexpr (!kWide) {
    const Type type = a.residual_type;
    const bool one_dtype = a.z_type == type && a.y_type == type && (a.branch == nullptr || a.branch_type == type);
    const bool plain = (a.add.is_default || a.branch == nullptr) && a.norm != Norm::none && !a.round_x_hat;
    const bool writes_along = (a.stream && a.branch != nullptr) || !a.prefetch_rows;
    if (one_dtype && plain && writes_along && end - begin > 1) {
      if (type == Type::f32 && !a.short_sums) return run_overlapped<float, WideSums>(a, begin, end, scratch);
      if (type == Type::f16) return run_overlapped<f16, ShortSums>(a, begin, end, scratch);
      // For few rows `split_parameter` would take longer than the pairs of bfloat16 save.
      if (type == Type::bf16 && end - begin > 4) return run_overlapped<bf16, ShortSums>(a, begin, end, scratch);
    }
  }
  const ReadRow read = pick_read(a);
  const WriteRows write1 = pick_write<1>(a), write2 = pick_write<2>(a);
  const int64_t bytes = a.d * size_of(a.z_type);
  char* const z = static_cast<char*>(a.branch != nullptr ? a.z : const_cast<void*>(a.residual));
  char* const spare = static_cast<char*>(scratch);
  unsigned char* const mask_scratch = reinterpret_cast<unsigned char*>(spare + (z != nullptr ? 0 : 2 * bytes));
  for (int64_t i = begin; i < end;) {
    const int n = end - i >= 2 ? 2 : 1;
    void* rows[2];
    Moments m[2];
    for (int r = 0; r < n; ++r) {
      rows[r] = z != nullptr ? z + (i + r) * bytes : spare + r * bytes;
      m[r] = read(a, i + r, rows[r], mask_scratch);
      if (a.stats != nullptr) store_moments(a, i + r, m[r]);
    }
    if (a.norm != Norm::none) (n == 2 ? write2 : write1)(a, i, rows, m);
    i += n;
  }
}

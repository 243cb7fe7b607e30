"""Tests of the classes and short names of kernels."""

from __future__ import annotations

import pytest

from systems.measure.profiler.kernel_names import NAME_LENGTH, kernel_class, short_kernel_name

ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, "
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>"
    " >, std::array<char*, 3ul>)"
)
_COPIED = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
    "const::{lambda()#7}::operator()() const::{lambda(float)#1}"
)
_LAUNCHED = (
    f"at::native::gpu_kernel_impl_nocast<{_COPIED}>(at::TensorIteratorBase&, {_COPIED} const&)::"
    "{lambda(int)#1}"
)
COPY = f"void at::native::elementwise_kernel<128, 2, {_LAUNCHED}>(int, {_LAUNCHED})"
# One name for each alternative of the patterns, and for those that an earlier pattern must match
NAMES = {
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>(T1::Params)": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matmul",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
    "ampere_sgemm_128x64_tn": "matmul",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>(int)": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>(int)": "matmul",
    "triton_tem_fused_mm_3": "matmul",
    "aten::bmm": "matmul",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float>(int)":
        "softmax",
    "triton_per_fused__softmax__to_copy_mul_2": "softmax",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>(int)":
        "attention",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3f_64x64x64": "attention",
    ELEMENTWISE: "elementwise",
    "void at::native::unrolled_elementwise_kernel<at::native::FillFunctor<float>>(int)":
        "elementwise",
    "void at::native::triu_tril_kernel<bool, int, true, 1, false>(int)": "elementwise",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_3": "elementwise",
    "aten::mul": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps<float>>>(int)":
        "reduction",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_1": "reduction",
    "aten::sum": "reduction",
    COPY: "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4>(float*)":
        "copy",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "aten::copy_": "copy",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>(int)":
        "optimizer",
    "adamw_kernel": "optimizer",
    "aten::_foreach_addcdiv_": "optimizer",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(int)": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_kernel_does_is_told_by_its_name(name):
    assert kernel_class(name) == NAMES[name]


def test_a_name_is_shown_without_arguments_and_namespaces():
    assert short_kernel_name(next(iter(NAMES))) == (
        "cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>"
    )
    assert short_kernel_name(ELEMENTWISE) == (
        "vectorized_elementwise_kernel<4, BinaryFunctor<float, float, float, "
        "MulFunctor<float>>, array<char*, 3ul>>"
    )
    assert short_kernel_name("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD"
    assert short_kernel_name("ampere_sgemm_128x64_tn") == "ampere_sgemm_128x64_tn"


def test_a_long_name_keeps_both_ends():
    short = short_kernel_name(COPY)
    assert len(short) == NAME_LENGTH and "..." in short
    assert short.startswith("elementwise_kernel<128, 2, ") and short.endswith("::{lambda(int)#1}>")

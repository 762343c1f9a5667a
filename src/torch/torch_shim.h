/* torch/torch_shim.h: the C functions of LibTorch that opaq calls, declared by us. Depends on nothing.
 *
 * They are LibTorch's stable C ABI (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h). The build
 * reads and needs no header of PyTorch. TORCH_SINCE marks each with the release that brought it; the build makes its
 * link-time stand-in for libtorch_cpu.so from these lines, so each declaration begins on a line of its own with that
 * mark and ends its name with "(" on that line. */
#ifndef OPAQ_TORCH_TORCH_SHIM_H
#define OPAQ_TORCH_TORCH_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TORCH_SINCE(major, minor)
/* Found at run time if the running torch has it. */
#define TORCH_OPTIONAL_SINCE(major, minor) __attribute__((weak))

/* One value on an operator's stack: a number, or a handle owned by the holder of the stack. */
struct torch_tensor;
struct torch_library;
struct torch_list;
struct torch_string;
struct torch_guard;
struct torch_stream;

/* clang-format off */

/* ---- registration ---- */
TORCH_SINCE(2, 7) uint64_t aoti_torch_abi_version(void); /* major, minor, patch in the top three bytes */
TORCH_SINCE(2, 7) int32_t aoti_torch_library_init_fragment(
    const char *name, const char *file, uint32_t line, struct torch_library **library);
TORCH_SINCE(2, 7) int32_t aoti_torch_library_init_impl(
    const char *name, const char *key, const char *file, uint32_t line, struct torch_library **library);
TORCH_SINCE(2, 7) int32_t aoti_torch_library_def(struct torch_library *library, const char *schema);
/* With tags, which functions like the second one return. Before 2.12 an operator defined from C has none. */
TORCH_OPTIONAL_SINCE(2, 12) int32_t torch_library_def_with_tags(
    struct torch_library *library, const char *schema, const int32_t *tags, int32_t count);
TORCH_OPTIONAL_SINCE(2, 12) int32_t torch_tag_nondeterministic_seeded(void);
TORCH_SINCE(2, 10) int32_t torch_library_impl(
    struct torch_library *library, const char *name,
    void (*kernel)(uint64_t *stack, uint64_t arguments, uint64_t results), uint64_t build_version);
/* Unregisters everything that was registered through it. */
TORCH_SINCE(2, 7) int32_t aoti_torch_delete_library_object(struct torch_library *library);

/* ---- tensors ---- */
TORCH_SINCE(2, 0) int32_t aoti_torch_delete_tensor_object(struct torch_tensor *tensor);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_dim(struct torch_tensor *tensor, int64_t *rank);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_sizes(struct torch_tensor *tensor, int64_t **sizes);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_strides(struct torch_tensor *tensor, int64_t **strides);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_dtype(struct torch_tensor *tensor, int32_t *dtype);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_layout(struct torch_tensor *tensor, int32_t *layout);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_device_type(struct torch_tensor *tensor, int32_t *type);
TORCH_SINCE(2, 0) int32_t aoti_torch_get_device_index(struct torch_tensor *tensor, int32_t *index);
TORCH_SINCE(2, 10) int32_t torch_get_const_data_ptr(struct torch_tensor *tensor, const void **data);
TORCH_SINCE(2, 10) int32_t torch_get_mutable_data_ptr(struct torch_tensor *tensor, void **data);
TORCH_SINCE(2, 0) int32_t aoti_torch_empty_strided(
    int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
    int32_t device_index, struct torch_tensor **tensor);
TORCH_SINCE(2, 0) int32_t aoti_torch_copy_(
    struct torch_tensor *to, struct torch_tensor *from, int32_t non_blocking);
TORCH_SINCE(2, 0) int32_t aoti_torch_new_tensor_handle(struct torch_tensor *tensor, struct torch_tensor **handle);

/* ---- gradients ---- */
TORCH_SINCE(2, 0) bool aoti_torch_grad_mode_is_enabled(void);
TORCH_SINCE(2, 0) void aoti_torch_grad_mode_set_enabled(bool enabled);
/* Whether a tensor requires a gradient. The C ABI has no function for it, so this is libc10's member function, called
 * with what a handle points to: a tensor is one pointer, to its TensorImpl. Optional: without it calls are not
 * watched. */
bool torch_impl_requires_grad(const void *impl) __asm__("_ZNK3c1010TensorImpl13requires_gradEv") __attribute__((weak));
/* A tensor's tangent in forward-mode differentiation; one without points to torch_undefined_impl. As above. */
const struct torch_tensor *torch_impl_tangent(const void *impl, uint64_t level, const struct torch_tensor *self)
    __asm__("_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE") __attribute__((weak));
extern const char torch_undefined_impl[] __asm__("_ZN3c1019UndefinedTensorImpl10_singletonE") __attribute__((weak));

/* Constructor and destructor of at::impl::MaybeSetTLSOnEntryGuard, one bool: from one to the other a
 * __torch_dispatch__ can be called by redispatching, as after PyTorch's own kernel of the key PythonTLSSnapshot. */
void torch_snapshot_begin(void *guard) __asm__("_ZN2at4impl23MaybeSetTLSOnEntryGuardC1Ev") __attribute__((weak));
void torch_snapshot_end(void *guard) __asm__("_ZN2at4impl23MaybeSetTLSOnEntryGuardD1Ev") __attribute__((weak));

/* Random integers from low to high - 1, from the default generator, into a tensor. (2.4 generated it first; the CUDA
 * one is looked up when it is needed.) */
TORCH_SINCE(2, 4) int32_t aoti_torch_cpu_randint_low_out(
    struct torch_tensor *out, int64_t low, int64_t high, const int64_t *size, int64_t size_count);

/* ---- numbers that stand for dtypes, devices, layouts ---- */
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_float64(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_float32(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_bfloat16(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_float16(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_uint8(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_int64(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_dtype_int32(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_device_type_cpu(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_device_type_cuda(void);
TORCH_SINCE(2, 0) int32_t aoti_torch_layout_strided(void);

/* ---- the current device and stream ---- */
TORCH_SINCE(2, 0) int32_t aoti_torch_create_device_guard(int32_t index, struct torch_guard **guard);
TORCH_SINCE(2, 0) int32_t aoti_torch_delete_device_guard(struct torch_guard *guard);
TORCH_SINCE(2, 9) int32_t aoti_torch_get_current_stream(int32_t index, struct torch_stream **stream); /* the caller's */
TORCH_SINCE(2, 9) int32_t aoti_torch_delete_stream(struct torch_stream *stream);
TORCH_OPTIONAL_SINCE(2, 13) int32_t torch_stream_native_handle(struct torch_stream *stream, void **native);

/* ---- lists and strings ---- */
TORCH_SINCE(2, 10) int32_t torch_new_list_reserve_size(size_t size, struct torch_list **list);
TORCH_SINCE(2, 10) int32_t torch_list_size(struct torch_list *list, size_t *size);
TORCH_SINCE(2, 10) int32_t torch_list_get_item(struct torch_list *list, size_t index, uint64_t *value);
TORCH_SINCE(2, 10) int32_t torch_list_set_item(struct torch_list *list, size_t index, uint64_t value);
TORCH_SINCE(2, 10) int32_t torch_list_push_back(struct torch_list *list, uint64_t value);
TORCH_SINCE(2, 10) int32_t torch_delete_list(struct torch_list *list); /* not its elements */
TORCH_SINCE(2, 10) int32_t torch_string_length(struct torch_string *string, size_t *length);
TORCH_SINCE(2, 10) int32_t torch_string_c_str(struct torch_string *string, const char **text);
TORCH_SINCE(2, 10) int32_t torch_new_string_handle(const char *text, size_t length, struct torch_string **string);
TORCH_SINCE(2, 10) int32_t torch_delete_string(struct torch_string *string);

/* ---- calling operators ---- */
/* The stack's handles go to the operator; its results are the caller's. */
TORCH_SINCE(2, 10) int32_t torch_call_dispatcher(
    const char *name, const char *overload, uint64_t *stack, uint64_t build_version);

/* ---- errors and threads ---- */
/* Throws, with `message`, if the condition is false. */
TORCH_SINCE(2, 0) void aoti_torch_check(
    bool condition, const char *function, const char *file, uint32_t line, const char *message);
TORCH_SINCE(2, 10) int32_t torch_get_num_threads(uint32_t *threads);
TORCH_SINCE(2, 10) int32_t torch_parallel_for(
    int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t begin, int64_t end, void *context),
    void *context);

/* ---- the box of an optional value: from 2.13 there is a function to free it, before it was C++'s delete ---- */
TORCH_OPTIONAL_SINCE(2, 13) int32_t torch_delete_stable_ivalue(uint64_t *box);
void torch_operator_delete(void *memory) __asm__("_ZdlPv");

/* clang-format on */

#endif

/* cli/read/st_dtype.h: the dtypes of safetensors files. */
#ifndef OPAQ_CLI_READ_ST_DTYPE_H
#define OPAQ_CLI_READ_ST_DTYPE_H

/* In the order of the safetensors package, whose writer sorts by it. */
enum st_dtype {
    ST_BOOL,
    ST_F4,
    ST_F6_E2M3,
    ST_F6_E3M2,
    ST_U8,
    ST_I8,
    ST_F8_E5M2,
    ST_F8_E4M3,
    ST_F8_E8M0,
    ST_F8_E4M3FNUZ,
    ST_F8_E5M2FNUZ,
    ST_I16,
    ST_U16,
    ST_F16,
    ST_BF16,
    ST_I32,
    ST_U32,
    ST_F32,
    ST_C64,
    ST_F64,
    ST_I64,
    ST_U64
};
#define ST_DTYPE_COUNT 22

const char *st_dtype_name(enum st_dtype dtype);
int st_dtype_bits(enum st_dtype dtype);

/* The dtype of a name, -1 if there is none. */
int st_dtype_find(const char *name);

/* The enum opaq_dtype: floats that opaq computes with, U8 for byte-sized codes; -1 if unsupported. */
int st_dtype_opaq(enum st_dtype dtype);

/* The reverse; U8 for bytes. */
enum st_dtype st_dtype_of_opaq(int dtype);

#endif

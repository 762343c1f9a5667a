/* cli/read/st_dtype.c: see st_dtype.h. */
#include "cli/read/st_dtype.h"

#include <string.h>

#include "opaq/op.h"

static const struct {
    const char *name;
    int bits;
    int dtype;
} rows[ST_DTYPE_COUNT] = {
    [ST_BOOL] = {"BOOL", 8, -1},
    [ST_F4] = {"F4", 4, -1},
    [ST_F6_E2M3] = {"F6_E2M3", 6, -1},
    [ST_F6_E3M2] = {"F6_E3M2", 6, -1},
    [ST_U8] = {"U8", 8, OPAQ_DTYPE_U8},
    [ST_I8] = {"I8", 8, OPAQ_DTYPE_U8},
    [ST_F8_E5M2] = {"F8_E5M2", 8, OPAQ_DTYPE_U8},
    [ST_F8_E4M3] = {"F8_E4M3", 8, OPAQ_DTYPE_U8},
    [ST_F8_E8M0] = {"F8_E8M0", 8, OPAQ_DTYPE_U8},
    [ST_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8, -1},
    [ST_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8, -1},
    [ST_I16] = {"I16", 16, -1},
    [ST_U16] = {"U16", 16, -1},
    [ST_F16] = {"F16", 16, OPAQ_DTYPE_F16},
    [ST_BF16] = {"BF16", 16, OPAQ_DTYPE_BF16},
    [ST_I32] = {"I32", 32, -1},
    [ST_U32] = {"U32", 32, -1},
    [ST_F32] = {"F32", 32, OPAQ_DTYPE_F32},
    [ST_C64] = {"C64", 64, -1},
    [ST_F64] = {"F64", 64, -1},
    [ST_I64] = {"I64", 64, -1},
    [ST_U64] = {"U64", 64, -1},
};

const char *st_dtype_name(enum st_dtype dtype) { return rows[dtype].name; }

int st_dtype_bits(enum st_dtype dtype) { return rows[dtype].bits; }

int st_dtype_find(const char *name) {
    for (int i = 0; i < ST_DTYPE_COUNT; ++i) {
        if (strcmp(rows[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

int st_dtype_opaq(enum st_dtype dtype) { return rows[dtype].dtype; }

enum st_dtype st_dtype_of_opaq(int dtype) {
    return dtype == OPAQ_DTYPE_F32    ? ST_F32
           : dtype == OPAQ_DTYPE_F16  ? ST_F16
           : dtype == OPAQ_DTYPE_BF16 ? ST_BF16
                                      : ST_U8;
}

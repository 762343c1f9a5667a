/* cpu/quant/remap_rows.c: copies codes and scales between copies: whole bytes where rows are contiguous, whole
 * tiles where codes are tiled, and the remainder with the reference. */
#include "cpu/quant/remap_rows.h"

#include <string.h>

#include "base/checked.h"
#include "format/swizzle.h"
#include "format/tile.h"

static bool is_along_rows(const struct quant_copy *copy) {
    return copy->tile_rows == 0 && copy->data_column_step == 1;
}

/* ---- codes: functions return the column of the target up to which rows [r, r_end) are copied ---- */

static int64_t move_bytes(const struct remap *remap, int64_t r, int64_t r_end) {
    const struct quant_copy *from = remap->from;
    const struct quant_copy *to = remap->to;
    const int packing = to->is_packed ? 2 : 1;
    const int64_t n = (remap->column_end - remap->column) / packing;
    for (int64_t row = r; row < r_end; ++row) {
        const int64_t source =
            (row + remap->row_offset) * from->data_row_step + remap->column + remap->column_offset;
        memcpy(to->data + (row * to->data_row_step + remap->column) / packing, from->data + source / packing,
               (size_t)n);
    }
    return remap->column + n * packing;
}

/* Moves nibbles 0 to 3 to positions 0, 2, 4 and 6, and back. */
static uint32_t spread_nibbles(uint32_t x) {
    x = (x | x << 8) & 0x00FF00FFu;
    return (x | x << 4) & 0x0F0F0F0Fu;
}

static uint32_t gather_nibbles(uint32_t x) {
    x = (x | x >> 4) & 0x00FF00FFu;
    return (x | x >> 8) & 0xFFFFu;
}

/* Converts eight columns from row order to tile order, and back. */
static uint32_t tiled_nibbles(uint32_t x) { return spread_nibbles(x & 0xFFFFu) | spread_nibbles(x >> 16) << 4; }

static uint32_t row_nibbles(uint32_t x) {
    return gather_nibbles(x & 0x0F0F0F0Fu) | gather_nibbles(x >> 4 & 0x0F0F0F0Fu) << 16;
}

/* Copies one row of a tile; `tile` is the row's start in the tile, `flat` its row-major counterpart. */
static void move_tile4_row(uint8_t *tile, uint8_t *flat, bool to_tiles) {
    enum { HALVES = TILE4_COLUMNS / 8, HALF_BYTES = 64 };
    for (int half = 0; half < HALVES; ++half) {
        uint32_t word;
        memcpy(&word, to_tiles ? flat + half * 4 : tile + half * HALF_BYTES, sizeof word);
        word = to_tiles ? tiled_nibbles(word) : row_nibbles(word);
        memcpy(to_tiles ? tile + half * HALF_BYTES : flat + half * 4, &word, sizeof word);
    }
}

static void move_tile8_row(uint8_t *tile, uint8_t *flat, bool to_tiles) {
    for (int pair = 0; pair < TILE8_COLUMNS / 2; ++pair) {
        uint8_t *const inside = tile + pair * TILE8_PAIR_BYTES;
        memcpy(to_tiles ? inside : flat + 2 * pair, to_tiles ? flat + 2 * pair : inside, 2);
    }
}

/* Copies all rows of a tile in loops that compilers vectorize: rows begin `step` bytes apart. */
static void read_tile4(const uint8_t *tile, uint8_t *rows, int64_t step) {
    enum { HALVES = TILE4_COLUMNS / 8 };
    uint32_t words[HALVES][TILE4_ROWS];
    memcpy(words, tile, sizeof words);
    for (int half = 0; half < HALVES; ++half) {
        for (int r = 0; r < TILE4_ROWS; ++r) {
            words[half][r] = row_nibbles(words[half][r]);
        }
    }
    for (int r = 0; r < TILE4_ROWS; ++r) {
        for (int half = 0; half < HALVES; ++half) {
            memcpy(rows + r * step + half * 4, &words[half][r], sizeof words[half][r]);
        }
    }
}

static void read_tile8(const uint8_t *tile, uint8_t *rows, int64_t step) {
    enum { PAIRS = TILE8_COLUMNS / 2 };
    uint16_t pairs[PAIRS][TILE8_ROWS];
    uint32_t words[PAIRS / 2][TILE8_ROWS];
    memcpy(pairs, tile, sizeof pairs);
    for (int i = 0; i < PAIRS / 2; ++i) {
        for (int r = 0; r < TILE8_ROWS; ++r) {
            words[i][r] = pairs[2 * i][r] | (uint32_t)pairs[2 * i + 1][r] << 16;
        }
    }
    for (int r = 0; r < TILE8_ROWS; ++r) {
        for (int i = 0; i < PAIRS / 2; ++i) {
            memcpy(rows + r * step + i * 4, &words[i][r], sizeof words[i][r]);
        }
    }
}

/* Copies `tiles` tiles of the same rows. */
static void read_tiles(const uint8_t *tile, int64_t tiles, bool is_packed, uint8_t *rows, int64_t step) {
    for (int64_t t = 0; t < tiles; ++t) {
        if (is_packed) {
            read_tile4(tile + t * TILE4_BYTES, rows + t * (TILE4_COLUMNS / 2), step);
        } else {
            read_tile8(tile + t * TILE8_BYTES, rows + t * TILE8_COLUMNS, step);
        }
    }
}

/* Codes of a row are read as little-endian words. */
static bool is_little_endian(void) {
    const uint16_t one = 1;
    uint8_t first;
    memcpy(&first, &one, 1);
    return first == 1;
}

/* Copies whole tiles of columns between tiles and rows, starting at a tile's first column. `flat` is the copy
 * in row order. */
static int64_t move_tiles(const struct remap *remap, int64_t r, int64_t r_end, bool to_tiles) {
    const struct quant_copy *tiled = to_tiles ? remap->to : remap->from;
    const struct quant_copy *flat = to_tiles ? remap->from : remap->to;
    const int64_t width = tiled->is_packed ? TILE4_COLUMNS : TILE8_COLUMNS;
    const int64_t tiles = (remap->column_end - remap->column) / width;
    const int64_t source_column = remap->column + remap->column_offset;
    const int64_t tiled_column = to_tiles ? remap->column : source_column;
    const int64_t flat_column = to_tiles ? source_column : remap->column;
    const int packing = tiled->is_packed ? 2 : 1;
    for (int64_t row = r; row < r_end; ++row) {
        const int64_t source = row + remap->row_offset;
        const int64_t tiled_row = to_tiles ? row : source;
        const int64_t flat_row = to_tiles ? source : row;
        int shift;
        uint8_t *tile =
            tiled->data + (tiled->is_packed ? tile4_offset(tiled_row, tiled_column, tiled->data_columns, &shift)
                                            : tile8_offset(tiled_row, tiled_column, tiled->data_columns));
        uint8_t *codes = flat->data + (flat_row * flat->data_row_step + flat_column) / packing;
        if (!to_tiles && tiled_row % tiled->tile_rows == 0 && r_end - row >= tiled->tile_rows) {
            read_tiles(tile, tiles, tiled->is_packed, codes, flat->data_row_step / packing);
            row += tiled->tile_rows - 1;
            continue;
        }
        for (int64_t t = 0; t < tiles; ++t, codes += width / packing) {
            if (tiled->is_packed) {
                move_tile4_row(tile, codes, to_tiles);
                tile += TILE4_BYTES;
            } else {
                move_tile8_row(tile, codes, to_tiles);
                tile += TILE8_BYTES;
            }
        }
    }
    return remap->column + tiles * width;
}

static int64_t move_codes(const struct remap *remap, int64_t r, int64_t r_end) {
    const struct quant_copy *from = remap->from;
    const struct quant_copy *to = remap->to;
    const bool starts_at_byte = !to->is_packed || (remap->column % 2 == 0 && remap->column_offset % 2 == 0);
    const int64_t width = to->is_packed ? TILE4_COLUMNS : TILE8_COLUMNS;
    const bool starts_tile =
        (to->tile_rows != 0 ? remap->column : remap->column + remap->column_offset) % width == 0;
    const bool can_be_tiles = starts_at_byte && starts_tile && is_little_endian();
    if (remap->is_transposed || to->is_hadamard) {
        return remap->column;
    }
    if (is_along_rows(from) && is_along_rows(to) && starts_at_byte) {
        return move_bytes(remap, r, r_end);
    }
    if (can_be_tiles && is_along_rows(from) && to->tile_rows != 0) {
        return move_tiles(remap, r, r_end, true);
    }
    if (can_be_tiles && is_along_rows(to) && from->tile_rows != 0) {
        return move_tiles(remap, r, r_end, false);
    }
    return remap->column;
}

/* ---- scales ---- */

/* Entries of a row at a constant step. */
struct scale_row {
    char *entry;
    int64_t step;
};

static bool has_scale_rows(const struct quant_copy *copy) { return copy->scale_layout.swizzled_columns == 0; }

static struct scale_row scale_row(const struct quant_copy *copy, int64_t row, int64_t block, int64_t bytes) {
    const struct scale_layout *layout = &copy->scale_layout;
    const bool is_tiled = layout->tiled_columns != 0;
    const int64_t first = is_tiled ? tile_scale_offset(row, 0, layout->tiled_columns, layout->tile_rows)
                                   : row / layout->row_per * layout->row_step;
    const int64_t step = is_tiled ? layout->tile_rows : layout->column_step;
    return (struct scale_row){(char *)copy->scale + (first + block * step) * bytes, step * bytes};
}

static bool move_scales(const struct remap *remap, int64_t r, int64_t r_end) {
    const struct quant_copy *from = remap->from;
    const struct quant_copy *to = remap->to;
    const int64_t block = to->block_columns;
    if (remap->is_transposed || !has_scale_rows(from) || !has_scale_rows(to) || remap->scale_bytes != 1 ||
        to->scale_layout.column_per != block || from->scale_layout.column_per != block ||
        remap->column % block != 0 || remap->column_offset % block != 0) {
        return false;
    }
    const int64_t count = ceil_div(remap->column_end - remap->column, block);
    for (int64_t row = r; row < r_end; ++row) {
        const struct scale_row target = scale_row(to, row, remap->column / block, 1);
        const struct scale_row source =
            scale_row(from, row + remap->row_offset, (remap->column + remap->column_offset) / block, 1);
        for (int64_t i = 0; i < count; ++i) {
            target.entry[i * target.step] = source.entry[i * source.step];
        }
    }
    return true;
}

void remap_rows(const struct remap *remap, int64_t r, int64_t r_end) {
    const int64_t moved = move_codes(remap, r, r_end);
    const bool has_scales = remap->scale_bytes == 0 || move_scales(remap, r, r_end);
    remap_rest_ref(remap, r, r_end, moved, !has_scales);
}

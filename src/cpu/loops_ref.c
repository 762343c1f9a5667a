/* cpu/loops_ref.c: the tables of loop_tables.h for any processor; tiles have 4 lanes, which every 64-bit processor
 * has. */
enum { TILE_LANES = 4, TILE_ROWS = 4, TILE_VECTORS = 2 };
#include "cpu/loop_tables.h"

LOOP_TABLES(ref, 0);

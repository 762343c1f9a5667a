# cmake -DINPUT=<file> -DOUTPUT=<file.c> -DNAME=<name> -DHEADER=<header> -P embed_text.cmake: writes a C file that
# defines `const char NAME[]` with the bytes of INPUT and a terminating zero. HEADER declares it.
get_filename_component(input_name "${INPUT}" NAME)
file(READ "${INPUT}" bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE "${OUTPUT}" "/* Generated from ${input_name}. */\n#include \"${HEADER}\"\n"
    "const char ${NAME}[] = {\n${bytes}0};\n")

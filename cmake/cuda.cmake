# cuda.cmake: compiles src/cuda with nvcc to libopaq_cuda.so, and with a C++ compiler for an emulated GPU, on which the C
# tests run. With OPAQ_CUDA=AUTO libopaq_cuda.so is built if nvcc works (opaq_cuda_probe) and the build is for this machine,
# without sanitizers, and not part of another project. OPAQ_CUDA_BUILT in the cache says what was chosen.
#
# Both link their own copy of the lower layers instead of libopaq.so: a program may be linked with libopaq.a, whose functions
# a shared object cannot see. CMake's CUDA language is not used: nvcc is called directly.

file(GLOB_RECURSE OPAQ_CUDA_SOURCES CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cuda/*.cu")
file(GLOB_RECURSE OPAQ_CUDA_HEADERS CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/base/*.h"
    "${PROJECT_SOURCE_DIR}/src/format/*.h" "${PROJECT_SOURCE_DIR}/src/backend/*.h" "${PROJECT_SOURCE_DIR}/src/definition/*.h"
    "${PROJECT_SOURCE_DIR}/src/cuda/*.h" "${PROJECT_SOURCE_DIR}/include/opaq/*.h")
set(OPAQ_CUDA_BELOW ${OPAQ_SOURCES})
list(FILTER OPAQ_CUDA_BELOW INCLUDE REGEX "/src/base/(error|version)\\.c$|/src/format/|/src/backend/(operand|quant_job)\\.c$")
list(FILTER OPAQ_CUDA_BELOW EXCLUDE REGEX "/(spec_intern|[a-z]+_text|layout_table|swizzle|decimal|spec_query)\\.c$")

# Limits the exports of a back end's shared object to <names>.
function(opaq_cuda_exports target names)
    set(script "${PROJECT_BINARY_DIR}/${target}.map")
    file(GENERATE OUTPUT "${script}" CONTENT "{ global: ${names} local: *; };\n")
    target_link_options(${target} PRIVATE "-Wl,--version-script=${script}" -Wl,--no-undefined)
    set_target_properties(${target} PROPERTIES LINK_DEPENDS "${script}")
endfunction()

add_library(opaq_cuda_below OBJECT EXCLUDE_FROM_ALL ${OPAQ_CUDA_BELOW})
opaq_compile(opaq_cuda_below)
set_target_properties(opaq_cuda_below PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
target_include_directories(opaq_cuda_below PRIVATE include src)

# ---- libopaq_cuda.so

# ON: machine code for Hopper, and PTX that the driver compiles for other GPUs. portable: that PTX only, so that a Hopper GPU
# runs and tests what the others do.
set(OPAQ_CUDA_CODE -gencode=arch=compute_80,code=compute_80)
if(NOT OPAQ_CUDA STREQUAL "portable")
    list(PREPEND OPAQ_CUDA_CODE -gencode=arch=compute_90a,code=sm_90a)
endif()

# Never -use_fast_math. -fmad=false: results are defined with one rounding per operation; products call __fmaf_rn() where
# they need fused multiply-adds.
set(OPAQ_NVCC_FLAGS -std=c++20 -O2 -DNDEBUG -fmad=false -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics,-Wall,-Wextra,-Wno-missing-field-initializers,-Wno-deprecated-enum-enum-conversion
    -Werror=all-warnings ${OPAQ_CUDA_CODE}
    "-I${PROJECT_SOURCE_DIR}/include" "-I${PROJECT_SOURCE_DIR}/src")

# Sets <problem> to why nvcc cannot build the back end, "" if it can. Compiles a file once for each nvcc.
function(opaq_cuda_probe problem)
    find_program(OPAQ_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
    set(${problem} "" PARENT_SCOPE)
    if(NOT OPAQ_NVCC)
        set(${problem} "there is no nvcc of CUDA 13 on PATH or in /usr/local/cuda/bin" PARENT_SCOPE)
        return()
    endif()
    get_filename_component(folder "${OPAQ_NVCC}" REALPATH)
    get_filename_component(folder "${folder}" DIRECTORY)
    find_library(OPAQ_CUDART cudart_static HINTS "${folder}/../lib64" "${folder}/../targets/x86_64-linux/lib"
        "${folder}/../targets/sbsa-linux/lib" /usr/local/cuda/lib64)
    if(NOT OPAQ_CUDART)
        set(${problem} "there is no libcudart_static.a beside ${OPAQ_NVCC}" PARENT_SCOPE)
    elseif(NOT OPAQ_NVCC_WORKS STREQUAL OPAQ_NVCC)
        set(probe "${PROJECT_BINARY_DIR}/cuda/probe")
        file(WRITE "${probe}.cu" "#if __CUDACC_VER_MAJOR__ < 13\n#error too old\n#endif\n__global__ void probe() {}\n")
        execute_process(COMMAND "${OPAQ_NVCC}" -std=c++20 -arch=compute_80 -c "${probe}.cu" -o "${probe}.o"
            RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
        if(status EQUAL 0)
            set(OPAQ_NVCC_WORKS "${OPAQ_NVCC}" CACHE INTERNAL "The nvcc that can build libopaq_cuda.so")
        elseif(error MATCHES "too old")
            set(${problem} "${OPAQ_NVCC} is older than CUDA 13" PARENT_SCOPE)
        else()
            set(${problem} "${OPAQ_NVCC} cannot compile C++20" PARENT_SCOPE)
        endif()
    endif()
endfunction()

set(opaq_cuda_build ${OPAQ_CUDA})
set(problem "")
if(OPAQ_CUDA STREQUAL "AUTO")
    set(opaq_cuda_build OFF)
    if(OPAQ_SANITIZE OR OPAQ_FUZZ OR CMAKE_CROSSCOMPILING OR APPLE OR NOT (OPAQ_DEVELOP OR SKBUILD))
        set(problem "this kind of build does not need it")
    else()
        opaq_cuda_probe(problem)
        if(NOT problem)
            set(opaq_cuda_build ON)
        endif()
    endif()
elseif(OPAQ_CUDA)
    opaq_cuda_probe(problem)
    if(problem)
        message(FATAL_ERROR "OPAQ_CUDA=${OPAQ_CUDA} needs nvcc of CUDA 13: ${problem}. Put it on PATH or set OPAQ_NVCC.")
    endif()
endif()
if(opaq_cuda_build)
    message(STATUS "CUDA back end: built with ${OPAQ_NVCC}; OPAQ_CUDA=OFF leaves it out")
elseif(problem)
    message(STATUS "CUDA back end: left out, ${problem}")
endif()
set(OPAQ_CUDA_BUILT ${opaq_cuda_build} CACHE INTERNAL "Whether libopaq_cuda.so is built")

if(opaq_cuda_build)
    set(objects "")
    foreach(source IN LISTS OPAQ_CUDA_SOURCES)
        get_filename_component(name "${source}" NAME_WE)
        set(object "${PROJECT_BINARY_DIR}/cuda/${name}.o")
        add_custom_command(OUTPUT "${object}" VERBATIM COMMENT "Compiling ${name}.cu"
            DEPENDS "${source}" ${OPAQ_CUDA_HEADERS} "${PROJECT_SOURCE_DIR}/tools/compile_cuda.sh"
            COMMAND "${PROJECT_SOURCE_DIR}/tools/compile_cuda.sh" "${OPAQ_NVCC}" "${source}" "${object}" ${OPAQ_NVCC_FLAGS})
        list(APPEND objects "${object}")
    endforeach()
    add_library(opaq_cuda SHARED ${objects} $<TARGET_OBJECTS:opaq_cuda_below>)
    set_target_properties(opaq_cuda PROPERTIES LINKER_LANGUAGE C)
    target_link_libraries(opaq_cuda PRIVATE "${OPAQ_CUDART}" m Threads::Threads ${CMAKE_DL_LIBS} rt)
    target_link_options(opaq_cuda PRIVATE -static-libgcc)
    opaq_cuda_exports(opaq_cuda "opaq_cuda_open;")
    if(SKBUILD)
        install(TARGETS opaq_cuda LIBRARY DESTINATION opaq COMPONENT python)
    else()
        install(TARGETS opaq_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
        install(FILES third_party/cuda/NOTICE RENAME NOTICE.cuda DESTINATION "${CMAKE_INSTALL_DOCDIR}")
    endif()
endif()

# ---- the emulated GPU

include(CheckLanguage)
set(OPAQ_EMULATION OFF)
if(OPAQ_TESTS AND NOT OPAQ_SANITIZE AND NOT CMAKE_CROSSCOMPILING AND NOT APPLE)
    check_language(CXX)
    if(CMAKE_CXX_COMPILER)
        enable_language(CXX)
        set(OPAQ_EMULATION ON)
    else()
        message(STATUS "There is no C++ compiler, so the CUDA back end is not tested on an emulated GPU.")
    endif()
endif()

if(OPAQ_EMULATION)
    set_source_files_properties(${OPAQ_CUDA_SOURCES} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
    add_library(opaq_cuda_emulated SHARED ${OPAQ_CUDA_SOURCES} tests/cuda/emulation.cc $<TARGET_OBJECTS:opaq_cuda_below>)
    set_target_properties(opaq_cuda_emulated PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS ON
        CXX_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
    target_compile_options(opaq_cuda_emulated PRIVATE -Wall -Wextra -Wno-missing-field-initializers -Wno-deprecated-enum-enum-conversion -Wno-unknown-pragmas -ffp-contract=off -O2)
    if(OPAQ_WERROR)
        target_compile_options(opaq_cuda_emulated PRIVATE -Werror)
    endif()
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
        target_compile_options(opaq_cuda_emulated PRIVATE -mfma) # calls of fmaf() instead would take minutes
    endif()
    target_include_directories(opaq_cuda_emulated PRIVATE tests/cuda include src)
    target_link_libraries(opaq_cuda_emulated PRIVATE m Threads::Threads ${CMAKE_DL_LIBS})
    add_library(fake_cublaslt SHARED tests/cuda/fake_cublaslt.c)
    opaq_compile(fake_cublaslt)
    set_target_properties(fake_cublaslt PROPERTIES C_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
    opaq_cuda_exports(opaq_cuda_emulated "opaq_cuda_open; emulation_set_hooks; emulation_capture; emulation_kernels; emulation_set_machine;")
endif()

# Sets the tests' environment variables for the back ends, and adds each test that calls operators once more, on the
# emulated GPU: with the products that have the CPU's bytes, and some with those of tensor cores, whose results are compared
# within a bound.
set(OPAQ_EMULATED_TESTS hiding golden device_quantize op_rearrange linear linear_options linear_given linear_delayed
    linear_parallel grouped_linear experts experts_activation experts_backward experts_composed experts_parallel
    experts_routing experts_tiled packed_backward runner_backward runner_prepared)
set(OPAQ_EMULATED_MMA_TESTS device_product device_order linear linear_given
    grouped_linear experts_composed packed_backward)
# Those that run once more with OPAQ_CUDA_PRODUCT=stream, whose results must have the same bits.
set(OPAQ_EMULATED_STREAM_TESTS device_product linear_given grouped_linear experts_composed experts:quantized_weights_of)
# With the kernels of OPAQ_CUDA_QUANTIZER=general.
set(OPAQ_EMULATED_GENERAL_TESTS device_quantize golden hiding linear linear_delayed)
function(opaq_cuda_tests)
    if(TARGET opaq_cuda)
        set_property(TEST test_backend_library APPEND PROPERTY ENVIRONMENT
            "OPAQ_TEST_REAL_CUDA_LIBRARY=$<TARGET_FILE:opaq_cuda>")
    endif()
    if(NOT OPAQ_EMULATION)
        return()
    endif()
    set_property(TEST test_backend_library APPEND PROPERTY ENVIRONMENT
        "OPAQ_TEST_CUDA_LIBRARY=$<TARGET_FILE:opaq_cuda_emulated>")
    set(environment "OPAQ_TEST_DEVICE=emulated;OPAQ_TEST_CUDA_LIBRARY=$<TARGET_FILE:opaq_cuda_emulated>;OPAQ_GOLDEN_DIR=${PROJECT_SOURCE_DIR}/tests/golden")
    foreach(name IN LISTS OPAQ_EMULATED_TESTS)
        add_test(NAME emulated_${name} COMMAND test_${name})
        set_tests_properties(emulated_${name} PROPERTIES TIMEOUT ${OPAQ_TEST_SECONDS} ENVIRONMENT
            "${environment};OPAQ_CUDA_PRODUCT=fma")
    endforeach()
    foreach(name IN LISTS OPAQ_EMULATED_GENERAL_TESTS)
        add_test(NAME emulated_general_${name} COMMAND test_${name})
        set_tests_properties(emulated_general_${name} PROPERTIES TIMEOUT ${OPAQ_TEST_SECONDS} ENVIRONMENT
            "${environment};OPAQ_CUDA_PRODUCT=fma;OPAQ_CUDA_QUANTIZER=general")
    endforeach()
    foreach(name IN LISTS OPAQ_EMULATED_MMA_TESTS)
        if(name IN_LIST OPAQ_EMULATED_STREAM_TESTS) # runs both ways below
            continue()
        endif()
        add_test(NAME emulated_mma_${name} COMMAND test_${name})
        set_tests_properties(emulated_mma_${name} PROPERTIES TIMEOUT ${OPAQ_TEST_SECONDS} ENVIRONMENT "${environment}")
    endforeach()
    foreach(item IN LISTS OPAQ_EMULATED_STREAM_TESTS) # a program, or one of its tests
        string(REPLACE ":" ";" parts "${item};")
        list(GET parts 0 name)
        list(GET parts 1 test)
        add_test(NAME emulated_stream_${name} COMMAND "${PROJECT_SOURCE_DIR}/tests/same_results.sh"
            $<TARGET_FILE:test_${name}> "${test}" OPAQ_CUDA_PRODUCT=stream)
        set_tests_properties(emulated_stream_${name} PROPERTIES TIMEOUT ${OPAQ_TEST_SECONDS} ENVIRONMENT "${environment}")
    endforeach()
    add_test(NAME emulated_cublaslt_status COMMAND test_cublaslt_status)
    set_tests_properties(emulated_cublaslt_status PROPERTIES TIMEOUT ${OPAQ_TEST_SECONDS} ENVIRONMENT
        "${environment};OPAQ_CUBLASLT_LIBRARY=$<TARGET_FILE:fake_cublaslt>")
endfunction()

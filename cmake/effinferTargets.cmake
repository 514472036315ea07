# Helpers for the targets of effinfer.

include(CheckCXXSourceCompiles)

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" effinfer_processor)
if(effinfer_processor MATCHES "x86_64|amd64" AND EFFINFER_VECTOR_KERNELS)
  set(EFFINFER_X86 ON)
else()
  set(EFFINFER_X86 OFF)
endif()

# Instruction-set levels beyond the baseline CPU (csrc/cpu/level.h) and their flags. On other
# processors they are left out.
set(EFFINFER_AVX2_FLAGS -mavx2 -mfma -mf16c -mbmi2)
set(EFFINFER_AVX512_FLAGS ${EFFINFER_AVX2_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl
    -mavx512vnni -mprefer-vector-width=512)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC's own AVX-512 headers initialise a vector with itself, which it then warns about.
  list(APPEND EFFINFER_AVX512_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(EFFINFER_AVX512BF16_FLAGS ${EFFINFER_AVX512_FLAGS} -mavx512bf16)
set(EFFINFER_AMX_FLAGS ${EFFINFER_AVX512BF16_FLAGS} -mamx-tile -mamx-bf16)
# GCC before 11, Clang before 12 and binutils before 2.35 have no AMX: the build then leaves those
# kernels out, and info() says so.
set(EFFINFER_AMX OFF)
if(EFFINFER_X86)
  set(CMAKE_REQUIRED_FLAGS "-mamx-tile -mamx-bf16")
  check_cxx_source_compiles([[
    int main() { __asm__ volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }
  ]] EFFINFER_COMPILES_AMX)
  unset(CMAKE_REQUIRED_FLAGS)
  if(EFFINFER_COMPILES_AMX)
    set(EFFINFER_AMX ON)
  endif()
endif()

set(EFFINFER_LEVELS portable)
if(EFFINFER_X86)
  list(APPEND EFFINFER_LEVELS avx2 avx512 avx512bf16)
endif()
if(EFFINFER_AMX)
  list(APPEND EFFINFER_LEVELS amx)
endif()

# What a source of a level sees: its name and a condition for #if.
function(effinfer_level_definitions level out)
  string(TOUPPER "${level}" upper)
  set(${out} EFFINFER_LEVEL=${level} EFFINFER_LEVEL_${upper}=1 PARENT_SCOPE)
endfunction()

# An object library for each level, effinfer_<level>, of the sources <op>.simd.cpp: a line
# "// Levels: portable avx2" in a source names its levels; without one they are portable, avx2 and
# avx512. Sets `out` to the libraries' objects.
function(effinfer_add_levels out)
  foreach(source IN LISTS ARGN)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
    set(levels portable avx2 avx512)
    file(STRINGS ${source} line REGEX "^// Levels: " LIMIT_COUNT 1)
    if(line)
      string(REGEX REPLACE "^// Levels: +" "" line "${line}")
      separate_arguments(levels UNIX_COMMAND "${line}")
    endif()
    foreach(level IN LISTS levels)
      list(APPEND sources_${level} ${source})
    endforeach()
  endforeach()
  foreach(level IN LISTS EFFINFER_LEVELS)
    if(sources_${level})
      string(TOUPPER "${level}" upper)
      set(target effinfer_${level})
      effinfer_level_definitions(${level} definitions)
      add_library(${target} OBJECT ${sources_${level}})
      effinfer_target_options(${target})
      target_compile_options(${target} PRIVATE ${EFFINFER_${upper}_FLAGS})
      if(EFFINFER_SANITIZE)
        # Such files are the longest to compile. Vectors that must be aligned fault, as null pointers
        # do; and where a vector is an array on the stack, watching it is most of the time, so that
        # one level has that for all.
        target_compile_options(${target} PRIVATE -fno-sanitize=alignment)
        if(NOT level STREQUAL avx2 AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
          target_compile_options(${target} PRIVATE "SHELL:--param asan-stack=0")
        endif()
      endif()
      target_compile_definitions(${target} PRIVATE ${definitions})
      target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc/include ${PROJECT_SOURCE_DIR}/csrc)
      list(APPEND objects $<TARGET_OBJECTS:${target}>)
    endif()
  endforeach()
  set(${out} ${objects} PARENT_SCOPE)
endfunction()

# The flags of a single source follow from its file name: <name>_avx2.cpp, <name>_avx512.cpp,
# <name>_avx512bf16.cpp, <name>_amx.cpp. Removes those of levels that are left out from `list`.
function(effinfer_select_isa_sources list)
  foreach(source IN LISTS ${list})
    if(source MATCHES "_(avx2|avx512|avx512bf16|amx)\\.cpp$")
      set(level ${CMAKE_MATCH_1})
      if(level IN_LIST EFFINFER_LEVELS)
        string(TOUPPER "${level}" upper)
        effinfer_level_definitions(${level} definitions)
        set_source_files_properties(${source} PROPERTIES
          COMPILE_OPTIONS "${EFFINFER_${upper}_FLAGS}" COMPILE_DEFINITIONS "${definitions}")
      else()
        list(REMOVE_ITEM ${list} ${source})
      endif()
    endif()
  endforeach()
  set(${list} ${${list}} PARENT_SCOPE)
endfunction()

# Files that have names of their own which others of their folder have, too.
set(EFFINFER_ALONE cpu/history_index cpu/page cpu/row_sampling compiler/compile_halves io/gguf_split
    io/gguf_writer io/quantize ops/paged_batch runtime/keep_top)

# Compiles ten files of a folder as one: most of the time of a file is that of its headers. Those with
# flags of their own CMake leaves out.
function(effinfer_group_sources target)
  set(count 0)
  set(before "")
  foreach(source IN LISTS ARGN)
    get_filename_component(folder ${source} DIRECTORY)
    if(NOT folder STREQUAL before)
      set(count 0)
      set(before ${folder})
    endif()
    math(EXPR number "${count} / 10")
    math(EXPR count "${count} + 1")
    file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/csrc ${folder})
    string(MAKE_C_IDENTIFIER "${name}_${number}" group)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
  list(TRANSFORM EFFINFER_ALONE REPLACE "(.+)" "csrc/\\1.cpp" OUTPUT_VARIABLE alone)
  if(EFFINFER_SANITIZE)
    # Random walks ask for what these do after each of their steps.
    set(checks csrc/kv/integrity.cpp csrc/kv/token_rows.cpp)
    set_source_files_properties(${checks} PROPERTIES COMPILE_OPTIONS -O1)
  endif()
  set_source_files_properties(${alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # Of types of unnamed namespaces, which a file that is included should not have.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

# Warnings, hidden visibility and sanitizers, for this target alone.
function(effinfer_target_options target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON
                        CXX_EXTENSIONS OFF CXX_STANDARD 20)
  if(EFFINFER_HIDES_INTERNALS)
    set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden
                          VISIBILITY_INLINES_HIDDEN ON)
  endif()
  # Contraction would make a sum depend on how the compiler groups it.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wnon-virtual-dtor
                         -ffp-contract=off -fno-math-errno)
  if(EFFINFER_X86)
    target_compile_definitions(${target} PRIVATE EFFINFER_X86=1)
  endif()
  if(EFFINFER_AMX)
    target_compile_definitions(${target} PRIVATE EFFINFER_AMX=1)
  endif()
  if(EFFINFER_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(EFFINFER_SANITIZE)
    # Null pointers fault, which ASan reports, too: checks of each of them are a fourth of what an
    # instrumented file takes to compile.
    target_compile_options(${target} PRIVATE -fsanitize=${EFFINFER_SANITIZE} -fno-sanitize=null
                           -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${EFFINFER_SANITIZE})
    # GCC loses track of what a variant holds once its code is instrumented.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  endif()
endfunction()

# Programs of tests, which take longer to compile than to run. (Most of those with sanitizers are not
# optimised.)
function(effinfer_test_options target)
  effinfer_target_options(${target})
  if(NOT EFFINFER_SANITIZE)
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()

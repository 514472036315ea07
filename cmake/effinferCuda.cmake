# The CUDA backend where nvcc is found (EFFINFER_CUDA: AUTO) or must be (ON): sets `cuda_status` to
# what info() says of it and `cuda_objects` to its objects, if any. Included, as a language is not
# enabled in a function.
if(NOT EFFINFER_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "EFFINFER_CUDA: expected AUTO, ON or OFF, got \"${EFFINFER_CUDA}\"")
endif()
if(NOT EFFINFER_CUDA STREQUAL "OFF")
  find_program(EFFINFER_NVCC nvcc)
endif()

# What calls nvcc: a tool that makes PTX small, if asked for and there is a Python to run it, behind
# ccache, which knows nvcc too, whose files take the longest.
function(effinfer_cuda_launcher out)
  set(tools ${PROJECT_SOURCE_DIR}/tools)
  set(launcher ${CMAKE_CUDA_COMPILER_LAUNCHER})
  if(EFFINFER_CUDA_SMALL)
    find_package(Python 3.10 COMPONENTS Interpreter QUIET)
  else()
    set(Python_Interpreter_FOUND OFF)
  endif()
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    set(launcher ${CMAKE_CXX_COMPILER_LAUNCHER})
    if(Python_Interpreter_FOUND)
      list(PREPEND launcher ${CMAKE_COMMAND} -E env
        "CCACHE_PREFIX=${Python_EXECUTABLE} ${tools}/nvcc_small_ptx.py"
        "CCACHE_EXTRAFILES=${tools}/nvcc_small_ptx.py:${tools}/ptx_registers.py")
    endif()
  elseif(Python_Interpreter_FOUND)
    list(APPEND launcher ${Python_EXECUTABLE} ${tools}/nvcc_small_ptx.py)
  endif()
  set(${out} ${launcher} PARENT_SCOPE)
endfunction()

# A bit for each first number of compute capabilities whose kernels wait for the kernel before, so that
# they may begin early. PTX below 9.0 has no instruction for it: GPUs that run that must not.
function(effinfer_cuda_waiting out)
  set(waiting 0)
  foreach(arch IN LISTS EFFINFER_CUDA_ARCHITECTURES)
    set(first 9)
    set(last 15) # native, all, ...: for the GPU that there is, or from 9.0 on
    if(arch MATCHES "^([0-9]+)[0-9]([af]?)(-real|-virtual)?$")
      set(first ${CMAKE_MATCH_1})
      if(CMAKE_MATCH_2 OR CMAKE_MATCH_3 STREQUAL "-real")
        set(last ${first}) # without PTX for later ones
      endif()
    endif()
    if(first GREATER_EQUAL 9)
      math(EXPR waiting "${waiting} | ((1 << (${last} + 1)) - (1 << ${first}))")
    endif()
  endforeach()
  set(${out} ${waiting} PARENT_SCOPE)
endfunction()

# Files of csrc/cuda that are compiled together, for GPUs and for the emulator, where CMake can (3.31).
# Most of the time of a file with small kernels is that of headers, for GPUs once for each
# architecture and twice for the host; and kernels that are alike compress better together.
set(EFFINFER_KERNEL_GROUPS small_kernels matmul_streams matmul_prompts hopper scores_and_lists
  attentions)
set(EFFINFER_KERNELS_small_kernels append_pages decode_pages elementwise embedding move_tokens operand
  rope rows sample top_rows)
set(EFFINFER_KERNELS_matmul_streams matmul_u4 matmul_u5_u6 matmul_u8_dense matmul_pair matmul_ternary)
set(EFFINFER_KERNELS_matmul_prompts tile_u4 tile_u5_u6 tile_u8_dense)
set(EFFINFER_KERNELS_hopper matmul matmul_tiles matmul_wgmma wgmma_u4 wgmma_u5_u6 wgmma_u8_dense
  wgmma_attention)
set(EFFINFER_KERNELS_scores_and_lists bucket_index caller_index column_index hash_index history_index
  key_scores page_index prefill_index row_top strided_index top_windows)
set(EFFINFER_KERNELS_attentions attention latent_attention plain_attention)
function(effinfer_group_kernels target)
  foreach(group IN LISTS EFFINFER_KERNEL_GROUPS)
    list(TRANSFORM EFFINFER_KERNELS_${group}
         REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/csrc/cuda/\\1.cu" OUTPUT_VARIABLE files)
    set_source_files_properties(${files} PROPERTIES UNITY_GROUP ${group})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

set(cuda_objects "")
if(EFFINFER_CUDA STREQUAL "OFF")
  set(cuda_status "not built: EFFINFER_CUDA=OFF")
elseif(NOT EFFINFER_NVCC AND EFFINFER_CUDA STREQUAL "ON")
  message(FATAL_ERROR "EFFINFER_CUDA=ON: expected nvcc on the PATH, found none")
elseif(NOT EFFINFER_NVCC)
  set(cuda_status "not built: no CUDA compiler found")
else()
  set(CMAKE_CUDA_COMPILER ${EFFINFER_NVCC})
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  file(GLOB cuda_kernels CONFIGURE_DEPENDS csrc/cuda/*.cu)
  add_library(effinfer_cuda OBJECT ${cuda_kernels} csrc/cuda/backend.cpp
    csrc/cuda/register.cpp csrc/cuda/tensor_map.cpp)
  effinfer_group_kernels(effinfer_cuda)
  set_target_properties(effinfer_cuda PROPERTIES
    CUDA_ARCHITECTURES "${EFFINFER_CUDA_ARCHITECTURES}" CUDA_STANDARD 20 CXX_STANDARD 20
    CUDA_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON
    VISIBILITY_INLINES_HIDDEN ON)
  effinfer_cuda_launcher(launcher)
  set_target_properties(effinfer_cuda PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
  # Functions that are constexpr are the host's and the device's. A spill is a bug.
  target_compile_options(effinfer_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;\
-Xptxas=--warn-on-spills>")
  if(EFFINFER_CUDA_SMALL)
    target_compile_options(effinfer_cuda PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>")
  endif()
  target_include_directories(effinfer_cuda PRIVATE ${PROJECT_SOURCE_DIR}/csrc/include
    ${PROJECT_SOURCE_DIR}/csrc ${CUDAToolkit_INCLUDE_DIRS})
  set(hopper 0)
  if(EFFINFER_CUDA_ARCHITECTURES MATCHES "90a")
    set(hopper 1)
  endif()
  effinfer_cuda_waiting(waiting)
  set_source_files_properties(csrc/cuda/backend.cpp PROPERTIES
    COMPILE_DEFINITIONS EFFINFER_CUDA_WAITING=${waiting})
  target_compile_definitions(effinfer_cuda PRIVATE EFFINFER_CUDA_HOPPER=${hopper})
  # For tools/check_sass.py.
  file(GENERATE OUTPUT cuda_objects.txt CONTENT "$<JOIN:$<TARGET_OBJECTS:effinfer_cuda>,\n>\n")
  set(cuda_status "built")
  set(cuda_objects $<TARGET_OBJECTS:effinfer_cuda>)
endif()

# Makes an executable run on the GPU: the objects and the runtime.
function(effinfer_link_cuda target)
  target_sources(${target} PRIVATE ${cuda_objects})
  target_include_directories(${target} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()
